"""Tools around the engine: measuring, checking, predicting, quantizing."""
