"""What ``--optimizer muon`` is here: the paper's recipe over megatron-core's own Muon.

``recipe.py`` holds the numbers and needs no torch; ``muon.py`` is the optimizer and its entry in Megatron's registry.
"""
