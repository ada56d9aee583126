"""What a user of the package ``tinker`` does; run by a Python that has it.

Arguments: the URL of the API and the name of the model. Prints a line of JSON.
"""

import json
import sys

import tinker
from tinker import types

TOKENS = [20, 21, 22, 23, 24]


def datum(tokens, **inputs):
    count = len(tokens) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], **(inputs or {"weights": [1.0] * count})},
    )


url, name = sys.argv[1:]
service = tinker.ServiceClient(base_url=url, api_key="tml-ada")
rest = service.create_rest_client()
served = rest.get_server_capabilities().result().supported_models
clients = [
    service.create_lora_training_client(base_model=name, rank=rank, seed=1).result()
    for rank in (2, 4)
]
losses = [[], []]
for _ in range(4):
    futures = []
    for client in clients:
        futures.append(client.forward_backward([datum(TOKENS), datum(TOKENS[:3])], "cross_entropy"))
        client.optim_step(types.AdamParams(learning_rate=0.01))
    for found, future in zip(losses, futures, strict=True):
        found.append(future.result().metrics["loss:sum"])
client = clients[0]
sampler = client.save_weights_and_get_sampling_client().result()
prompt = types.ModelInput.from_ints(TOKENS[:3])
params = types.SamplingParams(max_tokens=4, seed=3)
answer = sampler.sample(prompt, 2, params, include_prompt_logprobs=True).result()
sample = answer.sequences[0]
whole = [*TOKENS[:3], *sample.tokens]
output = client.forward([datum(whole)], "cross_entropy").result()
given = [0.0, 0.0, *sample.logprobs]
advantages = [0.0, 0.0, *[1.0] * len(sample.tokens)]
client.forward_backward(
    [datum(whole, logprobs=given, advantages=advantages)], "importance_sampling"
).result()
client.optim_step(types.AdamParams(learning_rate=0.001)).result()
path = client.save_state("one").result().path
before = client.forward([datum(TOKENS)], "cross_entropy").result().metrics["loss:sum"]
loaded = service.create_training_client_from_state_with_optimizer(path).result()
again = loaded.forward([datum(TOKENS)], "cross_entropy").result().metrics["loss:sum"]
try:
    loaded.forward_backward([datum(TOKENS)], "gspo").result()
    refused = ""
except tinker.RequestFailedError as error:
    refused = str(error)
listed = rest.list_checkpoints(client.model_id).result().checkpoints
print(
    json.dumps(
        dict(
            models=[each.model_name for each in served],
            losses=losses,
            logprobs=sample.logprobs,
            trained=output.loss_fn_outputs[0]["logprobs"].tolist()[2:],
            prompt_logprobs=answer.prompt_logprobs,
            before=before,
            again=again,
            refused=refused,
            listed=[each.checkpoint_id for each in listed if each.checkpoint_type == "training"],
        )
    )
)
