"""What is installed, which backend each part would use and why, and the remedy for what is missing or harmful.

``python -m megatron_exo.doctor [--json]`` exits with 0 when training can work here and with 1 when something missing,
broken or harmful prevents it.
"""
