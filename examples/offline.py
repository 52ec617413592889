"""Answers without a server: prompts in, texts out."""

from quire import LLM, SamplingParams

llm = LLM()  # the embedded model; LLM("path/or/hub-id") for any other
params = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=60, seed=1)

for output in llm.generate(["Once upon a time", "The little dog"], params):
    print(f"{output.prompt!r} -> {output.outputs[0].text!r}\n")
llm.shutdown()
