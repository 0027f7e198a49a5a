"""What is replaced in LMDeploy, as records: which module, what, why, until when. One place applies them, once each."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Final

from wrapt.importer import when_imported

from ... import envs
from . import contract, kept, paging, pools, processes, requests, scheduling
from .models.glm5_next import register as glm5_next

logger = logging.getLogger("dlinfer_ext")

MODELS: Final = "lmdeploy.pytorch.models"
Apply = Callable[[Any], str]  # the host's modules are not typed


@dataclass(frozen=True)
class Patch:
    """One replacement.

    Attributes:
        hook: the hook of contract.py it needs.
        module: applied right after this module is imported.
        vendors: the vendors it is for.
        apply: does it on the module and says what stands there now.
        why: the symptom without it.
        until: when it may go.
        needs: further hooks that rest on it; their seams have to fit too.
    """

    hook: str
    module: str
    vendors: tuple[str, ...]
    apply: Apply
    why: str
    until: str
    needs: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.hook} {self.module}"


def _backend(module: Any) -> str:
    if _vendor == "cpu":
        from .cpu_host import backend_class

        module.AscendOpsBackend = backend_class()
    else:
        from .backend import GatedDeltaAscendBackend

        module.AscendOpsBackend = GatedDeltaAscendBackend
    return f"AscendOpsBackend is {module.AscendOpsBackend.__name__}"


def _norm(module: Any) -> str:
    from ... import ops

    def build_rmsnorm_gated(hidden_size: int, eps: float = 1e-6, **kwargs: Any) -> Any:
        return ops.RMSNormGated(hidden_size, eps=eps, **kwargs)

    module.build_rmsnorm_gated = build_rmsnorm_gated
    return "build_rmsnorm_gated gives dlinfer_ext's RMSNormGated"


def _model_names(module: Any) -> str:
    """A model that was imported before its names were replaced, or that builds the metadata itself (Qwen3-Next)."""
    from lmdeploy.pytorch.nn import gated_delta

    from .gated_delta import GatedDeltaMetadata

    module.build_rmsnorm_gated = gated_delta.build_rmsnorm_gated
    module.GatedDeltaMeta = GatedDeltaMetadata
    return "build_rmsnorm_gated and GatedDeltaMeta are dlinfer_ext's"


def _parsers(module: Any) -> str:
    from .reasoning import register

    return register(module)


def _seeds(module: Any) -> str:
    from .seeds import patch_spec_agent

    return patch_spec_agent(module)


def _cpu(name: str) -> Apply:
    def apply(module: Any) -> str:
        from . import cpu_host

        return str(getattr(cpu_host, name)(module))

    return apply


_BOTH: Final = ("ascend", "cpu")
_CPU: Final = ("cpu",)
PATCHES: Final = (
    Patch(
        "H2",
        contract.ASCEND,
        _BOTH,
        _backend,
        "CausalConv1dBuildSpec is not supported by ascend backend",
        "LMDeploy's in-tree Ascend operators (PR 4999) keep the operator contract",
        needs=("H3", "H4"),  # what the backend answers, and the step's metadata
    ),
    Patch(
        "H5", "lmdeploy.pytorch.nn.gated_delta", _BOTH, _norm, "No module named 'fla'", "LMDeploy builds it by a spec"
    ),
    Patch("H5", f"{MODELS}.qwen3_5", _BOTH, _model_names, "as above, by a name bound earlier", "as above"),
    Patch(
        "H5",
        f"{MODELS}.qwen3_next",
        _BOTH,
        _model_names,
        "metadata that is wrong for short chunks and empty rows",
        "Qwen3-Next asks the backend for its metadata, as Qwen3.5 does",
    ),
    Patch(
        "H9",
        "lmdeploy.pytorch.configurations.qwen3_5",
        _BOTH,
        partial(pools.patch_builder, name="Qwen3_5ModelConfigBuilder"),
        "each state access is a two-byte run",
        "LMDeploy asks the backend for the pool's layout",
    ),
    Patch(
        "H9",
        "lmdeploy.pytorch.configurations.qwen3_next",
        _BOTH,
        partial(pools.patch_builder, name="Qwen3NextModelConfigBuilder"),
        "each state access is a two-byte run",
        "LMDeploy asks the backend for the pool's layout",
    ),
    Patch(
        "H10",
        "lmdeploy.pytorch.engine.executor.ray_executor",
        _BOTH,
        processes.patch_ray_settings,
        "workers of a Ray that was running before take other routes and vendors than the engine was told",
        "LMDeploy hands on the caller's environment",
    ),
    Patch(
        "H11",
        "lmdeploy.pytorch.engine.mp_engine.zmq_engine",
        _BOTH,
        processes.patch_engine_start,
        "the server now and then ends at start with EOFError in mp_engine_proc",
        "LMDeploy keeps the manager until the engine process has left its condition",
    ),
    Patch(
        "H12",
        "lmdeploy.pytorch.spec_decode.spec_agent",
        _BOTH,
        _seeds,
        "the same seed gives other text in another batch",
        "the rejection sampling spec hands over seeds and positions",
    ),
    Patch(
        "H13",
        "lmdeploy.pytorch.paging.scheduler",
        _BOTH,
        scheduling.patch_scheduler,
        "text that is wrong from a preemption on: the recurrent state takes a token twice",
        "LMDeploy frees the state of a preempted sequence, or keeps the token of the step under way",
    ),
    Patch(
        "H7",
        "lmdeploy.pytorch.engine.executor.mp_executor",
        _CPU,
        _cpu("patch_notifier"),
        "tp > 1 hangs after some tokens",
        "LMDeploy awaits the barrier",
    ),
    Patch(
        "H7",
        "lmdeploy.pytorch.engine.executor.ray_executor",
        _CPU,
        _cpu("patch_ray_shutdown"),
        "two ranks on Ray now and then hang when they are closed",
        "LMDeploy bounds the wait",
    ),
    Patch(
        "H8",
        "lmdeploy.pytorch.config",
        _CPU,
        _cpu("patch_dtype"),
        "exact comparison needs fp32",
        "LMDeploy allows dtype='float32'",
    ),
    Patch(
        "H15",
        "lmdeploy.pytorch.models.module_map",
        _BOTH,
        glm5_next.register_architectures,
        "Can not found rewrite for architectures: ['Glm5NextForConditionalGeneration']",
        "LMDeploy has the model for this backend (its PR 4968 is for CUDA)",
    ),
    Patch(
        "H15",
        "lmdeploy.pytorch.configurations",
        _BOTH,
        glm5_next.register_builder,
        "the model's layers and caches are taken for those of a plain transformer",
        "as above",
    ),
    Patch(
        "H15",
        "lmdeploy.pytorch.config",  # after H8, which sets the dtype that this one follows
        _BOTH,
        glm5_next.follow_dtype,
        "the convolution's window has another dtype than what is written to it",
        "state caches can say that they follow the activations",
    ),
    Patch(
        "H16",
        "lmdeploy.serve.parsers.response_parser",
        _BOTH,
        _parsers,
        "GLM: no reasoning parser; an answer behind a call is taken for reasoning; a call that was cut off is closed",
        "LMDeploy has a reasoning parser for GLM-4.5 and later",
    ),
    Patch(
        "H17",
        "lmdeploy.serve.core.async_engine",
        _BOTH,
        requests.patch_preprocess,
        "a token id out of the vocabulary or an empty prompt ends the engine, for every client",
        "LMDeploy checks a request before its engine loop takes it",
    ),
    Patch(
        "H17",
        "lmdeploy.serve.openai.endpoints.common",
        _BOTH,
        requests.patch_settings,
        "min_p out of its range is status 500 without a word",
        "as above",
    ),
    Patch(
        "H18",
        "lmdeploy.pytorch.engine.executor.mp_executor",
        _BOTH,
        processes.patch_worker_watch,
        "a worker that is killed leaves every answer of tp > 1 waiting for good",
        "LMDeploy watches its workers",
    ),
    Patch(
        "H19",
        "lmdeploy.pytorch.paging.scheduler",
        _BOTH,
        paging.patch_metrics,
        "nothing tells slots and blocks that were not freed from those that are in use",
        "LMDeploy's metrics count state slots, and blocks without those of the prefix cache",
    ),
    *(
        Patch(
            "H20",  # after H9, whose builder is one that stays
            module,
            _BOTH,
            partial(kept.keep, names=names),
            "dlinfer's start-up puts forms of an older LMDeploy there, which take the state pools for others",
            "dlinfer replaces nothing that LMDeploy builds by a spec",
        )
        for module, names in kept.NAMES.items()
    ),
    Patch(
        "H6",
        "lmdeploy.pytorch.ray",
        _CPU,
        _cpu("offer_ray_devices"),
        "waits 1,800 s for a placement group",
        "never: a CPU has no NPU resource",
    ),
)

_vendor: str | None = None
_done: dict[str, str] = {}


def resolve_vendor() -> str:
    """Return the vendor: DLINFER_EXT_VENDOR, or ascend where torch_npu is installed.

    Raises:
        RuntimeError: neither; nothing falls back to the CPU by itself.
    """
    vendor = envs.VENDOR.get()
    if vendor:
        return vendor
    if importlib.util.find_spec("torch_npu") is not None:
        return "ascend"
    raise RuntimeError(
        "DLINFER_EXT_VENDOR is not set and torch_npu is not installed: set DLINFER_EXT_VENDOR=ascend on an Ascend "
        "machine (with torch_npu and dlinfer), or DLINFER_EXT_VENDOR=cpu to run on this CPU"
    )


def install(vendor: str | None = None) -> None:
    """Register every patch of the vendor on the module it belongs to; a second call does nothing.

    Args:
        vendor: "ascend" or "cpu"; None takes DLINFER_EXT_VENDOR.

    Raises:
        RuntimeError: another vendor was installed before in this process.
    """
    global _vendor
    if vendor is None:
        try:
            vendor = resolve_vendor()
        except RuntimeError as error:
            _explain_at_use(str(error))
            return
    if _vendor == vendor:
        return
    if _vendor is not None:
        raise RuntimeError(f"dlinfer_ext: vendor {_vendor} is installed in this process; cannot install {vendor}")
    _vendor = vendor
    if vendor == "cpu":
        from ...vendor.cpu import cuda_names, importer

        # Before anything else of LMDeploy: its environment check makes a tensor on "cuda".
        cuda_names.install()
        importer.install_stand_in()
    for patch in PATCHES:
        if vendor in patch.vendors:
            when_imported(patch.module)(partial(_apply, patch))


def _explain_at_use(message: str) -> None:
    """LMDeploy serves other devices too, so a missing vendor is an error only where the Ascend backend is asked for."""
    from ...vendor.cpu import importer

    importer.install_hint()

    def refuse(_: ModuleType) -> None:
        if _vendor is None:  # one may have been installed since, by a call of `install`
            raise RuntimeError(message)

    when_imported(contract.ASCEND)(refuse)


def _apply(patch: Patch, module: ModuleType) -> None:
    contract.require((patch.hook, *patch.needs))
    if patch.key not in _done:
        _done[patch.key] = patch.apply(module)
        logger.info("%s: %s", patch.key, _done[patch.key])


def reapply() -> None:
    """Put back what the vendor's own start-up may have replaced (dlinfer patches the same names on a card)."""
    for patch in PATCHES:
        if patch.hook in ("H2", "H5", "H20") and patch.key in _done and _vendor in patch.vendors:
            _done[patch.key] = patch.apply(sys.modules[patch.module])


def status() -> dict[str, Any]:
    """Return {"vendor", "lmdeploy", "patches": [{hook, module, state, now, why, until}]} for this process."""
    rows = [
        {
            "hook": p.hook,
            "module": p.module,
            "state": "applied" if p.key in _done else "pending",
            "now": _done.get(p.key, ""),
            "why": p.why,
            "until": p.until,
        }
        for p in PATCHES
        if _vendor in p.vendors
    ]
    return {"vendor": _vendor, "lmdeploy": contract.host_version(), "patches": rows}
