"""A conversation without a server: messages in, the model's answer out."""

from quire import LLM, SamplingParams

llm = LLM()  # the embedded model; LLM("path/or/hub-id") for any other
conversation = [{"role": "user", "content": "Tell me a story about a cat."}]
(answer,) = llm.chat(conversation, SamplingParams(temperature=0.7, max_tokens=100))
print(answer.outputs[0].text)
llm.shutdown()
