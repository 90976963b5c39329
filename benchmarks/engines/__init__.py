"""vLLM's own benchmark against vLLM servers with the adapter and without, on a CPU.

    python -m benchmarks.engines.bench    `vllm bench serve`, the servers in turn

| file | what it does |
| --- | --- |
| `environment.py` | makes vLLM's environment, and a model that two ranks can split |
| `server.py` | starts `vllm serve` on loopback, and ends it with all that it started |
| `timed_workers.py` | workers that time their LM head and sampler |
| `steps.py` | reads these times |
| `bench.py` | asks the servers in turn, and compares their texts |
| `rounds.py` | makes rows of the page from the rounds |
"""
