"""Scheduling settings as JSON: shown, and changed while the server runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from headrace.config import Settings
from headrace.core.errors import InvalidRequest
from headrace.core.request import PriorityClass
from headrace.scheduling import ClassPolicy, SchedulingPolicy

__all__ = ["Tuning"]

AUTO = "auto"
_CLASS_FIELDS = tuple(field.name for field in fields(ClassPolicy))
_POLICY_FIELDS = tuple(field.name for field in fields(SchedulingPolicy) if field.name != "classes")


@dataclass(frozen=True, slots=True)
class Tuning:
    """What an operator may change together. `itl_target_s` None is automatic."""

    policy: SchedulingPolicy
    itl_target_s: float | None = None

    @classmethod
    def of(cls, settings: Settings) -> Tuning:
        chosen = settings.scheduling
        policy = SchedulingPolicy(
            auto_targets=chosen.auto_targets,
            preemption=chosen.preemption,
            max_queue=settings.limits.max_queue,
        )
        for priority_class, ttft_s in (
            (PriorityClass.SYSTEM, chosen.system_ttft),
            (PriorityClass.INTERACTIVE, chosen.interactive_ttft),
            (PriorityClass.STANDARD, chosen.standard_ttft),
            (PriorityClass.BATCH, chosen.batch_ttft),
        ):
            own = replace(policy.classes[priority_class], ttft_s=ttft_s)
            policy = policy.with_class(priority_class, own)
        return cls(policy, chosen.itl_target)

    def shown(self) -> dict[str, object]:
        """Plain JSON values under the names that `changed` takes."""
        return {
            "itl_target_s": AUTO if self.itl_target_s is None else self.itl_target_s,
            **{name: getattr(self.policy, name) for name in _POLICY_FIELDS},
            "classes": {
                priority_class.name.lower(): {
                    name: getattr(self.policy.classes[priority_class], name)
                    for name in _CLASS_FIELDS
                }
                for priority_class in PriorityClass
            },
        }

    def changed(self, changes: Mapping[str, object]) -> Tuning:
        """With all of `changes`. Raises InvalidRequest naming the key that is unknown or wrong."""
        plain = {key: value for key, value in changes.items() if key in _POLICY_FIELDS}
        for key in changes:
            if key not in plain and key not in ("classes", "itl_target_s"):
                raise InvalidRequest(f"'{key}' is not a scheduling setting.", param=_shown(key))
        values: dict[str, object] = {
            key: _like(getattr(self.policy, key), value, key) for key, value in plain.items()
        }
        values["classes"] = self._classes(changes.get("classes", {}))
        try:
            policy = replace(self.policy, **values)  # type: ignore[arg-type]  # checked above
        except ValueError as error:
            raise InvalidRequest(f"The settings do not go together: {error}.") from None
        return Tuning(policy, self._itl(changes))

    def _classes(self, changes: object) -> dict[PriorityClass, ClassPolicy]:
        classes = dict(self.policy.classes)
        for name, wanted in _mapping(changes, "classes").items():
            found = [c for c in PriorityClass if c.name.lower() == name]
            param = f"classes.{_shown(name)}"
            if not found:
                raise InvalidRequest(f"'{param}' is not a priority class.", param=param)
            old = classes[found[0]]
            values: dict[str, float] = {}
            for key, value in _mapping(wanted, param).items():
                if key not in _CLASS_FIELDS:
                    place = f"{param}.{_shown(key)}"
                    raise InvalidRequest(f"'{place}' is not a setting of a class.", param=place)
                values[key] = float(_like(0.0, value, f"{param}.{key}"))
            try:
                classes[found[0]] = replace(old, **values)
            except ValueError as error:
                raise InvalidRequest(f"'{param}' is not valid: {error}.", param=param) from None
        return classes

    def _itl(self, changes: Mapping[str, object]) -> float | None:
        if "itl_target_s" not in changes:
            return self.itl_target_s
        value = changes["itl_target_s"]
        if value in (None, AUTO):
            return None
        seconds = _like(0.0, value, "itl_target_s")
        if not 0.0 < seconds < 3600.0:
            raise InvalidRequest(
                "'itl_target_s' is a positive number of seconds or \"auto\".", param="itl_target_s"
            )
        return float(seconds)


def _mapping(value: object, param: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"'{param}' should be an object.", param=param)
    return value


def _like(old: object, value: object, param: str) -> float:
    """The value, if it is of the kind that the setting is of."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(old, bool):
        if isinstance(value, bool):
            return value
        raise InvalidRequest(f"'{param}' should be true or false.", param=param)
    if isinstance(old, int):
        if isinstance(value, int) and number:
            return value
        raise InvalidRequest(f"'{param}' should be an integer.", param=param)
    if isinstance(value, (int, float)) and number and abs(value) < float("inf"):
        return value
    raise InvalidRequest(f"'{param}' should be a number.", param=param)


def _shown(name: str) -> str:
    """A caller's word, short and printable."""
    return "".join(c for c in name[:64] if c.isprintable())
