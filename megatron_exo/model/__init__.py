"""The ExoFormer model: the mechanism in ten minutes, in this order.

``mixing.py`` (the paper's equation and its coefficients), ``anchors.py`` (the second representation that is
mixed in), ``attention.py`` and ``layer.py`` (where both meet Megatron's classes), ``specs.py`` (which linear, norm
and attention classes a backend brings), ``gpt.py`` (the model around the layers).
"""
