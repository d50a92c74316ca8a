"""Whether a device computes what the CPU computes: the checks behind ``tools/gpu_smoke.py``.

``cases.py`` says what is run and how far it may deviate, ``checks.py`` runs one case, ``compare.py`` measures
deviations, ``process.py`` keeps cases in a process of their own, ``report.py`` prints.
"""
