"""Hugging Face weights in and out, by one list of rules per family that works in both directions.

A rule pairs a parameter of `VLMModel` with the HF tensors that it is made of, and an operation that knows how
tensor parallelism cuts it. From safetensors, import reads only the slices that this rank holds; export
gathers one parameter at a time. Layer and expert numbers are global on both sides.
"""
