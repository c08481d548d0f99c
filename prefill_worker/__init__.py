"""The prefill worker: computes prompts, draws the first token, hands the KV to a decode worker."""
