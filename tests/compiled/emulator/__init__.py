"""Executes the PTX that Triton compiles, on a CPU, on the memory of ordinary CPU tensors.

    gpu = EmulatedGpu.install(90)       # before anything is launched; TRITON_INTERPRET is unset
    sampler = LMHeadSampler(weight, backend="triton")
    sampler(hidden_states, batch, positions)
    assert not gpu.report.doubts

Kernels are compiled for the architecture with the specialisation that a launch on a GPU would have,
up to PTX. The package's own Python code runs unchanged above them. All threads of some programs
run together as arrays, one basic block at a time:

    ptx            the text of a kernel as instructions
    translation    a basic block as a Python function on registers, by tables of `instructions`
    machine        the threads of some programs, from block to block
    threads        barriers, warps, and how a fault is told
    accesses       `global_memory`, the storages of tensors, and stores that wait
    pending        asynchronous work, which takes effect as late as it may
    shared_memory  bounds, unwritten bytes, races; asynchronous copies
    matrices       products of warps and warp groups
    tensor_memory  products of sm_100, and mbarriers
    gpu            in place of Triton's driver
"""
