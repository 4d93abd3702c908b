"""One file per model family, named after its HF `model_type`."""
