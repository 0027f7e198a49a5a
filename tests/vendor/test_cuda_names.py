"""`torch.cuda` names on a machine with no card: in a process of their own, as they change torch."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

SETUP = "import torch; from dlinfer_ext.vendor.cpu import cuda_names; cuda_names.install(); cuda_names.install()\n"


def run(code: str, **env: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SETUP + textwrap.dedent(code)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


CASES = {
    "factories": """
        made = [torch.zeros(2, device='cuda'), torch.ones(2, device='cuda:1'), torch.tensor([1], device='cuda')]
        made += [torch.arange(3, device=torch.device('cuda')), torch.zeros(1).new_empty(2, device='cuda')]
        made += [torch.empty(1, device=0), torch.empty(2, pin_memory=True)]
        assert {t.device.type for t in made} == {'cpu'}
        """,
    "moves": """
        t = torch.zeros(2)
        moved = [t.to('cuda'), t.to(0), t.to(torch.device('cuda', 1), non_blocking=True), t.to(device='cuda')]
        moved += [t.cuda(), t.to(torch.float16).to('cuda', torch.float32)]
        assert {m.device.type for m in moved} == {'cpu'}
        assert t.to(torch.int64).dtype == torch.int64
        assert t.to(torch.zeros(1, dtype=torch.float64)).dtype == torch.float64
        assert torch.nn.Linear(2, 2).to('cuda').cuda().weight.device.type == 'cpu'
        """,
    "other-devices-stay": """
        assert torch.empty(1, device='meta').device.type == 'meta'
        assert torch.zeros(1).to('meta').device.type == 'meta'
        assert torch.randint(3, (2,), device='cpu').shape == (2,)
        """,
    "context-of-another-device": """
        with torch.device('meta'):
            assert torch.arange(3).device.type == torch.zeros(1).device.type == 'meta'
            assert torch.ones(1, device='cuda').device.type == 'cpu'
        """,
    "device-context": """
        with torch.device('cuda'):
            assert torch.zeros(1).device.type == 'cpu'
        """,
    "streams": """
        mine = torch.cuda.Stream()
        assert torch.cuda.current_stream() != mine
        with torch.cuda.stream(mine):
            assert torch.cuda.current_stream() is mine
            with torch.cuda.stream(None):
                assert torch.cuda.current_stream() is mine
        assert torch.cuda.current_stream() is not mine
        event = torch.cuda.Event(enable_timing=True); event.record(); event.synchronize()
        assert event.query() and event.elapsed_time(event) == 0
        import threading
        seen = []
        with torch.cuda.stream(mine):
            worker = threading.Thread(target=lambda: seen.append(torch.cuda.current_stream()))
            worker.start()
            worker.join()
        assert seen[0] is not mine
        """,
    "device-answers": """
        assert torch.cuda.mem_get_info() == (1000, 1000)
        assert torch.cuda.get_device_properties(0).total_memory == 1000
        assert torch.cuda.device_count() == 1 and torch.cuda.current_device() == 0
        torch.cuda.synchronize(); torch.cuda.empty_cache(); torch.cuda.set_device(3)
        assert not torch.cuda.is_available()
        """,
    "collectives": """
        import os, torch.distributed as dist
        os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT='0')
        dist.init_process_group('nccl', init_method='tcp://127.0.0.1:0', rank=0, world_size=1)
        assert dist.get_backend() == 'gloo'
        group = dist.new_group([0], backend='hccl')
        assert dist.get_backend(group) == 'gloo'
        dist.destroy_process_group()
        """,
    "dynamo-still-imports": """
        import torch._dynamo.trace_rules as rules
        rules.get_torch_obj_rule_map()
        """,
}


@pytest.mark.parametrize("code", CASES.values(), ids=CASES)
def test_names(code: str) -> None:
    run(code, DLINFER_EXT_CPU_MEMORY="1000")
