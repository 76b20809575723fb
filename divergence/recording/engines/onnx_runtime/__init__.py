"""ONNX Runtime as an engine: what a graph of ONNX computes, seen by module paths.

``engine``   the engine and its session
``options``  what ONNX Runtime is told, and what of it is here
``file``     an ONNX file: read, checked, its tensors as torch's
``graph``    which module each node belongs to, and the values at the edges of modules
``weights``  the graph's constants under the names of transformers, and the modules themselves
``model``    both, with the config and tokenizer beside the file
``pieces``   parts of the graph that run by themselves
``forward``  one pass: what is fetched, what is put in place, what is recorded

``onnx`` and ``onnxruntime`` are imported here alone, when the engine is used.
"""
