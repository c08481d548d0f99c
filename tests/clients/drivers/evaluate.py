"""lm-eval: a task of choices and one of generation, read from local files, over /v1/completions."""

import json
import sys
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

url, model, tokenizer, backend, tasks = sys.argv[1:]
arguments = {
    "base_url": f"{url}/completions",
    "model": model,
    "tokenizer_backend": backend,
    "num_concurrent": 4,
    "max_retries": 1,
    "max_length": 1024,
    "batch_size": 2,
}
if backend == "huggingface":
    arguments["tokenizer"] = tokenizer
data = Path(tasks) / "data.jsonl"
choices = [
    {"question": "The colour of grass is", "choices": [" green", " the sky and more", " not what you think it was"]},
    {"question": "One and one are", "choices": [" two", " three", " what they would be"]},
    {"question": "Up there", "choices": [" which", " when"]},
]
data.write_text("".join(json.dumps(one | {"label": 0}) + "\n" for one in choices))
common = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(data)}},
    "test_split": "test",
    "doc_to_text": "{{question}}",
}
for name, own in {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "output": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
}.items():
    # JSON is YAML.
    (Path(tasks) / f"{name}.yaml").write_text(json.dumps({"task": name, **common, **own}))

result = lm_eval.simple_evaluate(
    model="local-completions",
    model_args=arguments,
    tasks=["choices", "output"],
    task_manager=TaskManager(include_path=tasks, include_defaults=False),
    log_samples=True,
    bootstrap_iters=0,
    limit=None,
)
samples = result["samples"]
print(
    json.dumps(
        {
            "choices": [
                [context, continuation, float(value), greedy]
                for sample in samples["choices"]
                for (context, continuation), (((value, greedy)),) in zip(
                    (request[:2] for request in sample["arguments"]), sample["resps"], strict=True
                )
            ],
            "outputs": [[sample["arguments"][0][0], sample["resps"][0][0]] for sample in samples["output"]],
            "accuracy": result["results"]["choices"]["acc,none"],
        }
    )
)
