"""Building blocks of the models. Tensor parallelism is in linear and embedding alone."""
