"""A real vLLM server with tpsample, driven by the `openai` client, without a GPU.

    make engines                          python -m benchmarks.engines --help
    python -m benchmarks.engines.bench    `vllm bench serve`, with the adapter and without

| file | what it does |
| --- | --- |
| `command.py` | starts server after server, and writes the page |
| `comparison.py` | says what each server is asked, and compares their answers |
| `environment.py` | makes vLLM's environment, and a model that two ranks can split |
| `server.py` | starts `vllm serve` on loopback, and ends it with all that it started |
| `asked.py` | lists the requests |
| `client.py` | asks a server; it runs in vLLM's environment, because `openai` is there |
| `workers.py` | watches a worker: the oracle's tokens, and what crosses between ranks |
| `traffic.py` | counts the tensors that ranks send, and the largest axis of each |
| `huggingface.py` | asks `generate` of transformers the same |
| `sglang.py` | asks SGLang the same, on one rank and on two |
| `verdicts.py` | says what was compared, and whether it held |
| `page.py` | makes the page |
| `bench.py` | runs vLLM's own benchmark against servers with the adapter and without, in turn |
| `bench_page.py` | makes its page, with where tpsample loses |
| `sglang_on_cpu/` | stands in for what SGLang imports and does not need on a CPU |
| `v2_on_cpu/sitecustomize.py` | lets vLLM's runner V2 run its kernels in Triton's interpreter |
"""
