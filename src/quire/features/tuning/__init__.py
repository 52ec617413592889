"""Plans of linear layers, measured for a model's own shapes while its engine is idle."""
