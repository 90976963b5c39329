"""AMD's GPUs: what the kernels compile to for them, and what is left out there."""

import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
import triton

from benchmarks.lab.absent import AMD_ARCHS
from benchmarks.static import amd
from benchmarks.static.builds import lm_head, package_kernels
from tests.support.commands import run_command
from tpsample import noise
from tpsample.backends.triton_.tile_table import AMD_SHARED_BYTES, Gpu, all_tiles, fitted, rule
from tpsample.core import machine
from tpsample.core.weight_format import BF16
from tpsample.reference import NEAR_TIE

MI300 = Gpu("AMD Instinct MI300X", 94, 304, AMD_SHARED_BYTES, amd=True)


def run_report(folder, *options):
    """Return the rows of a report without a fault."""
    record, cache = folder / "amd.json", f"{triton.knobs.cache.dir}-report"
    command = (sys.executable, "-m", "benchmarks.static.amd", "--cache", cache, "--json", record)
    done = run_command(*command, *options, timeout_s=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(record.read_text())


def test_the_lm_head_and_the_kernel_that_waits_compile(tmp_path):
    rows = run_report(tmp_path, "--few")
    assert {row["arch"] for row in rows} == {f"gfx{arch}" for arch in AMD_ARCHS}
    assert {row["kernel"] for row in rows} == {"lm_head_kernel", "peer_finish_kernel"}


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_every_kernel_compiles(tmp_path):
    rows = run_report(tmp_path)
    kernels = {name.split(":")[1] for name in package_kernels()}
    for arch in AMD_ARCHS:
        assert {row["kernel"] for row in rows if row["arch"] == f"gfx{arch}"} >= kernels


@pytest.mark.parametrize(
    ("vgpr_spills", "local", "product", "fault"),
    [
        (0, 65536, "v_mfma_f32_32x32x8_bf16", ""),
        (3, 65536, "v_mfma_f32_32x32x8_bf16", "spills: 3 vgpr_spills"),
        (0, 65540, "v_mfma_f32_32x32x8_bf16", "local memory: 65540 of 65536 bytes"),
        (0, 65536, "v_fma_f32", "no matrix instruction"),
        (0, 65536, "v_mfma_f32_32x32x8_bf16\n" + "\tv_add_f64 v[0:1]\n" * 17, "float64: 17"),
    ],
    ids=["right", "spills", "local memory", "no product", "float64"],
)
def test_the_report_says_no(vgpr_spills, local, product, fault):
    numbers = dict.fromkeys(amd.METADATA.values(), 0) | {"vgpr_spill_count": vgpr_spills}
    assembly = f"\t{product} v1\n" + "".join(f"    .{name}: {n}\n" for name, n in numbers.items())
    tile, weights = all_tiles()[0]
    (*faults,) = amd.judge(lm_head(942, tile, weights), assembly, local)["faults"]
    assert [each[: len(fault)] for each in faults] == [fault] * bool(fault)


def test_tiles_fit_the_local_memory():
    for tile, weights in all_tiles():
        if weights.tensor_cores:
            taken = fitted(tile, MI300)
            stage = 2 * (taken.block_v + taken.block_b) * taken.block_d
            assert max(1, taken.num_stages - 1) * stage <= 64 * 1024
    assert rule(256, 128256, BF16, MI300).block_b == 128


def test_an_mi300_is_no_hopper_though_it_reports_9_4(monkeypatch):
    of = SimpleNamespace(name=MI300.name, major=9, minor=4, multi_processor_count=304)
    of.shared_memory_per_block_optin = 0
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: of)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    monkeypatch.setattr(machine, "interpreted", lambda: False)
    device = torch.device("cuda")
    assert Gpu.of(device).hopper and machine.kernels_overlap.__wrapped__(device)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert Gpu.of(device) == MI300 and Gpu.of(device).shared_bytes == AMD_SHARED_BYTES
    assert not MI300.hopper and not machine.kernels_overlap.__wrapped__(device)


def test_the_noise_in_triton_is_that_in_assembly():
    done = run_command(sys.executable, "-m", "tests.compiled.steps.portable_noise")
    assert done.returncode == 0, done.stderr


def test_logarithms_3_ulp_off_keep_the_noise_within_its_bound():
    ends, middle = torch.arange(2**12), torch.arange(0, 2**32, 65521)
    words = torch.cat([ends, middle, 2**32 - 1 - ends])
    for quad_xor in (words, (words * 2654435761) & 0xFFFFFFFF):
        found = noise.log2_exponential(words, quad_xor).double().abs()
        of_tail = (words >= 2**30) * 3 * 2.0**-23 / math.log(2)  # moves a logarithm by so much
        off = of_tail + 3 * 2.0**-23 * torch.exp2(found.log2().floor())
        assert found.max() < 49 and off.max() < 1.2e-5 < NEAR_TIE
