"""Fine-tuning: the data set, token rows, the run on transformers' Trainer, its checkpoints."""
