"""The parts of a step around the model."""
