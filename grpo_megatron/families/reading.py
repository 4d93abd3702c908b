"""Reads the fields of an HF config.json and collects everything that is wrong with it before it complains."""

from collections.abc import Mapping
from typing import Any

from grpo_megatron.families.base import RopeScaling


class ConfigReader:
    """One config.json; every getter notes a problem and goes on, `finish` raises them together."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._problems: list[str] = []

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            return self._wrong(key, value, "a whole number above 0", 1)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            return self._wrong(key, value, "a number above 0", 1.0)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._config.get(key, default)
        return value if isinstance(value, bool) else self._wrong(key, value, "true or false", False)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id, a list of ids, or nothing."""
        value = self._config.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in ids):
            return self._wrong(key, value, "a token id or a list of them", ())
        return tuple(ids)

    def only(self, key: str, allowed: tuple[Any, ...], why: str) -> None:
        """A field that changes the model in a way that is not built here: absent, null or one of `allowed`."""
        value = self._config.get(key)
        if value is not None and value not in allowed:
            self._problems.append(f"{key} is {value!r}: {why}")

    def rope(self) -> tuple[float, RopeScaling | None]:
        """Base and scaling, from `rope_theta` and `rope_scaling` or from `rope_parameters` (transformers 5)."""
        merged: dict[str, Any] = {}
        for key in ("rope_scaling", "rope_parameters"):
            part = self._config.get(key)
            if part is None:
                continue
            if not isinstance(part, dict) or any(isinstance(value, dict) for value in part.values()):
                self._problems.append(f"{key} is {part!r}: expected one set of values for all layers")
                continue
            merged |= part
        theta = merged.get("rope_theta", self._config.get("rope_theta", 10000.0))
        if self._config.get("rope_theta", theta) != theta:
            self._problems.append(f"rope_theta is {self._config['rope_theta']} but rope_parameters says {theta}")
        if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
            theta = self._wrong("rope_theta", theta, "a number above 0", 1.0)
        if merged.get("partial_rotary_factor", 1.0) != 1.0:
            self._problems.append(f"partial_rotary_factor is {merged['partial_rotary_factor']}: only 1.0 is built here")
        return float(theta), self._rope_scaling(merged)

    def finish(self) -> None:
        """Raise if anything was wrong.

        Raises:
            ValueError: one line per problem.
        """
        if self._problems:
            raise ValueError("\n".join(self._problems))

    def note(self, problem: str) -> None:
        self._problems.append(problem)

    def _rope_scaling(self, values: Mapping[str, Any]) -> RopeScaling | None:
        kind = values.get("rope_type", values.get("type", "default"))
        if kind == "default":
            return None
        if kind != "llama3":
            self._problems.append(f"rope_type is {kind!r}: known here are 'default' and 'llama3'")
            return None
        inner = ConfigReader(
            {"original_max_position_embeddings": self._config.get("max_position_embeddings"), **values}
        )
        scaling = RopeScaling(
            "llama3",
            factor=inner.number("factor"),
            low_freq_factor=inner.number("low_freq_factor"),
            high_freq_factor=inner.number("high_freq_factor"),
            original_max_positions=inner.integer("original_max_position_embeddings"),
        )
        self._problems += [f"rope scaling: {problem}" for problem in inner._problems]
        return scaling

    def _value(self, key: str, default: Any) -> Any:
        value = self._config.get(key)
        return default if value is None else value

    def _wrong(self, key: str, value: Any, expected: str, stand_in: Any) -> Any:
        found = "is missing" if value is None else f"is {value!r}"
        self._problems.append(f"{key} {found}: expected {expected}")
        return stand_in


def refuse_unsupported_layers(reader: ConfigReader) -> None:
    """Fields of decoder-only configurations that would change the computation and that nothing here computes."""
    reader.only("hidden_act", ("silu", "swish"), "only 'silu' is built here")
    reader.only("mlp_bias", (False,), "biases in the MLP are not built here")
    reader.only("quantization_config", (), "quantised weights cannot be trained; convert the model to bfloat16 first")
    reader.only("attention_dropout", (0, 0.0), "no dropout is applied here; set it to 0.0")
    reader.only("pretraining_tp", (1,), "only 1 is computed here; it changes no weights, set it to 1")
    reader.only("partial_rotary_factor", (1, 1.0), "only 1.0 is built here")
    reader.only("add_cross_attention", (False,), "cross attention is not built here")
