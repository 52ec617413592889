"""Texts as vectors, and which of them are alike."""

import numpy as np

from quire import LLM

texts = ["A fox ran through the snow.", "The fox was running in winter.", "Two plus two is four."]

llm = LLM()  # the embedded model; any other causal model will do
vectors = np.array([output.outputs.embedding for output in llm.embed(texts)])
print(np.round(vectors @ vectors.T, 3))  # they have length 1: products are cosines
llm.shutdown()
