"""From text to Megatron datasets: a demo corpus, tokenizers, tokenisation, validation.

Nothing is imported here; only ``preprocess`` touches megatron-core, and only when it writes.
"""
