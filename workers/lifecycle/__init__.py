"""How a model comes to this worker and leaves it again, in parts that `workers.lifecycle.models` puts together.

instance     one set of weights: its state, the models that share it
sharing      which models may share one
loading      one load: files, adapter, proof, measured memory
proof        the canned inferences after a load
fingerprint  what they gave the first time, and whether they still do
memory       the budget, and what a load really took
eviction     who has to go
loras        LoRA adapters beside the weights
crashes      which loads the process died of
accepted     the catalog for a worker that starts again
"""
