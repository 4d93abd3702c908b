"""The random number generators of one rank, as a part of the run's state."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker


class RandomState:
    """Python's, numpy's and torch's generators, and megatron-core's tracker of tensor-parallel ones. A `Stateful`."""

    def state_dict(self) -> dict[str, Any]:
        name, keys, position, has_gauss, gauss = np.random.get_state()
        version, words, next_gauss = random.getstate()
        return {
            "python": {"version": version, "words": list(words), "next_gauss": next_gauss},
            "numpy": {
                "name": str(name),
                "keys": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "gauss": float(gauss),
            },
            "torch": torch.get_rng_state(),
            "device": torch.cuda.get_rng_state(),
            "tracker": dict(get_cuda_rng_tracker().get_states()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        python, generator = state["python"], state["numpy"]
        random.setstate((python["version"], tuple(python["words"]), python["next_gauss"]))
        np.random.set_state(
            (
                generator["name"],
                generator["keys"].numpy().astype(np.uint32),
                generator["position"],
                generator["has_gauss"],
                generator["gauss"],
            )
        )
        torch.cuda.set_rng_state(state["device"])
        torch.set_rng_state(state["torch"])
        get_cuda_rng_tracker().set_states(dict(state["tracker"]))
