"""A real vLLM server with tpsample, driven by the `openai` client, without a GPU: `make engines`.

    python -m tests.engines --help

| file | what it does |
| --- | --- |
| `command.py` | starts server after server, and writes the page |
| `comparison.py` | says what each server is asked, and compares their answers |
| `asked.py` | lists the requests |
| `client.py` | asks a server; it runs in vLLM's environment, because `openai` is there |
| `workers.py` | watches a worker: the oracle's tokens, and what crosses between ranks |
| `on_hosts.py` | starts a server over two network namespaces, where there are root and memory |
| `processors.py` | is a logits processor for servers of runner V2 |
| `traffic.py` | counts the tensors that ranks send, and the largest axis of each |
| `eagle.py`, `lora.py` | write a drafter of EAGLE that knows the answers, and an adapter of LoRA |
| `huggingface.py`, `sglang.py` | ask `generate` of transformers, and SGLang, the same |
| `verdicts.py` | says what was compared, and whether it held |
| `sglang_on_cpu/` | stands in for what SGLang imports and does not need on a CPU; changes it |
| `v2_on_cpu/sitecustomize.py` | lets vLLM's runner V2 run its kernels in Triton's interpreter |
"""
