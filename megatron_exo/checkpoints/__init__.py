"""Checkpoints as folders: what is in one, whether it is whole, which to keep.

A run's folder holds ``iter_NNNNNNN`` folders and a tracker file that names the one to load. Each is a ``torch_dist``
checkpoint of Megatron's with a manifest of ours, ``exo_manifest.json``, which is written last of all files and before
the tracker: a folder with a manifest is whole, and the manifest says how to tell whether it still is.
"""
