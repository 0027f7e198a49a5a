"""What LMDeploy needs on a machine with no card, beyond `torch.cuda` names: backend answers, the mp notifier, fp32."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import torch

from ... import envs

# How long a closing executor waits for something that may never come.
SHUTDOWN_S: Final = 5.0


def backend_class() -> type:
    """Return the CPU's backend: the Ascend one, with the answers that would ask a card."""
    from lmdeploy.pytorch.backends.graph_runner import GraphRunner

    from .backend import GatedDeltaAscendBackend

    class CpuOpsBackend(GatedDeltaAscendBackend):
        """LMDeploy's device_type="ascend" on a CPU; the operators are the Ascend adapter's."""

        @staticmethod
        def get_k_block_shape(block_size: int, num_heads: int, head_size: int, dtype: Any) -> tuple[int, ...]:
            return (block_size, num_heads, head_size)

        get_v_block_shape = get_k_block_shape

        @staticmethod
        def build_graph_runner(
            model: Any, model_config: Any, cache_config: Any, backend_config: Any, device: Any
        ) -> Any:
            """Without graphs; eager_mode=False gives steps the shape that graphs give them (cpu_graphs.py)."""
            if backend_config.eager_mode:
                return GraphRunner(model, model_config, cache_config, backend_config, device)
            from . import graph_rows
            from .cpu_graphs import PaddedGraphRunner

            runner = PaddedGraphRunner(model, model_config, cache_config, backend_config, device)
            return graph_rows.attach(runner) if model_config.is_gated_delta else runner

        @staticmethod
        def init() -> None:
            """There is no card to initialise; the vendor's host shims were installed with the patches."""

        @staticmethod
        def ccl_backend() -> str:
            return "gloo"

        @staticmethod
        def device_count() -> int:
            return len(os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "0").split(","))

        @staticmethod
        def support_ray() -> bool:
            import importlib.util

            return importlib.util.find_spec("ray") is not None

    return CpuOpsBackend


def patch_notifier(module: Any) -> str:
    """Wait for the barrier in a thread.

    Every 32nd message both ranks enter `Notifier.wait_async`'s barrier on their event loop while the other may sit in
    a synchronous gloo collective: a deadlock that asynchronous device collectives do not have.
    """
    last = module.NUM_SHARED_BLOCK - 1

    @asynccontextmanager
    async def wait_async(self: Any) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self.events[self._event_id].wait)
        yield
        if self._event_id == last:
            await loop.run_in_executor(None, self.bar.wait)
            await loop.run_in_executor(None, self.bar.wait)
        self._update_event_id()

    module.Notifier.wait_async = wait_async
    _bound_shutdown(module)
    return "Notifier.wait_async waits in a thread; closing is bounded in time"


def _bound_shutdown(module: Any) -> None:
    """Let closing the mp executor end whatever its workers do.

    `multiprocessing.Event.set` waits until every sleeper has woken. A worker that was ended while one of its threads
    slept on the event never wakes, and whoever sets it then waits for good: the other worker, and the process that
    joins it. Nothing is lost by giving up at that point: all answers have been given.
    """
    original = module.Notifier.close

    def close(self: Any) -> None:
        closing = threading.Thread(target=original, args=(self,), daemon=True)
        closing.start()
        closing.join(SHUTDOWN_S)

    def join(self: Any) -> None:
        if self._proc is None:
            return
        self._proc.join(2 * SHUTDOWN_S)
        if self._proc.is_alive():
            self._proc.kill()
            self._proc.join()

    module.Notifier.close = close
    module.ExecutorProc.join = join


def patch_ray_shutdown(module: Any) -> str:
    """Bound in time what LMDeploy waits for when a Ray executor stops ("hope this will not lead to hanging").

    One rank may be told to stop before it joins a step's collective in which the other already waits: with gloo, a
    wait in the event loop. What follows, `release`, ends the workers in any case.
    """
    original = module.RayExecutor.collective_rpc

    def collective_rpc(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        if method != "stop_async":
            return original(self, method, *args, **kwargs)
        try:
            return original(self, method, *args, **{"timeout": SHUTDOWN_S} | kwargs)
        except module.ray.exceptions.GetTimeoutError:
            logging.getLogger("dlinfer_ext").info("a Ray worker did not stop within %s s", SHUTDOWN_S)

    module.RayExecutor.collective_rpc = collective_rpc
    return "RayExecutor waits for its workers to stop for a while only"


def patch_dtype(module: Any) -> str:
    """Run the engine in fp32 under DLINFER_EXT_CPU_DTYPE=float32; LMDeploy allows 16-bit types only."""
    original = module._update_torch_dtype

    def update(config: Any, dtype: str, device_type: str = "auto") -> Any:
        config = original(config, dtype, device_type=device_type)
        if envs.CPU_DTYPE.get() == "float32":
            config.dtype = torch.float32
            config.states_shapes = [(shape, torch.float32) for shape, _ in config.states_shapes]
        return config

    module._update_torch_dtype = update
    return "_update_torch_dtype honours DLINFER_EXT_CPU_DTYPE"


def offer_ray_devices(module: Any) -> str:
    """Give Ray the NPU resource and the device list that LMDeploy's Ray executor asks for.

    Runs as `lmdeploy.pytorch.ray` is imported, before that module starts Ray: Ray reads both in this process and hands
    them to its own. Values already set are kept, and a device list that is set also says how many NPUs there are, as
    Ray refuses more NPUs than visible devices.
    """
    devices = os.environ.setdefault("ASCEND_RT_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    os.environ.setdefault("RAY_OVERRIDE_RESOURCES", json.dumps({"NPU": len(devices.split(","))}))
    # Ray asks CANN for the card's name, and logs the failed import with its traceback.
    logging.getLogger("ray._private.accelerators.npu").setLevel(logging.CRITICAL)
    # A Ray that was started without NPUs (by the user, or on another host) never gets them: 30 s instead of 1,800 s.
    module.PG_WAIT_TIMEOUT = 30
    return "Ray is offered NPUs where none are set, and waited for 30 s"
