"""ONNX Runtime as an engine: what a graph of ONNX computes, seen by module paths."""
