"""From text to Megatron datasets: a demo corpus, tokenizers, tokenisation, validation, and the provider of a run."""
