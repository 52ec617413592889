"""A batch with log-probabilities: how sure is the model of each of its tokens?"""

from quire import LLM, SamplingParams

llm = LLM()
params = SamplingParams(temperature=0, max_tokens=8, logprobs=3)

for output in llm.generate(["The sun is", "A fish can", "My mother said"], params):
    completion = output.outputs[0]
    print(f"{output.prompt!r}{completion.text!r}")
    for token, entry in zip(completion.token_ids, completion.logprobs or [], strict=True):
        others = ", ".join(
            f"{alternative.decoded_token!r} {alternative.logprob:.2f}"
            for other, alternative in entry.items()
            if other != token
        )
        print(f"  {entry[token].decoded_token!r:14} {entry[token].logprob:6.2f}   ({others})")
llm.shutdown()
