"""ONNX Runtime as an engine: what a graph of ONNX computes, seen by module paths.

``engine``   the options, what is refused, the session
``file``     an ONNX file: read, checked, its tensors as torch's
``graph``    which module each node belongs to, and the values at the edges of modules
``weights``  the graph's constants under the names of transformers, and the modules themselves
``pieces``   parts of the graph that run by themselves
``forward``  one pass: what is fetched, what is put in place, what is recorded

``onnx`` and ``onnxruntime`` are imported here alone, when the engine is used.
"""
