"""Results of evaluations (lm-eval, evalscope, opencompass, inspect, plain tables), compared."""
