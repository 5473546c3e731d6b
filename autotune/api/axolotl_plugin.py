"""A plug-in for Axolotl: it checks a run before step 1, and measures it.

Axolotl loads it from the run's file:

    plugins: [autotune.api.axolotl_plugin.PreflightPlugin]
    autotune: {gpu: rtx-4090} # the arguments of PreflightCallback; may be left out
"""

from typing import Any

from axolotl.integrations.base import BasePlugin

from autotune.api.trainer_callback import PreflightCallback

OPTIONS = "autotune"  # the key of this plug-in's options


class PreflightPlugin(BasePlugin):
    """Adds the PreflightCallback to a run of Axolotl."""

    def register(self, cfg: dict[str, Any]) -> None:
        """Keep the keys of the user's file, which say more than the arguments of the Trainer."""
        self._run = {key: value for key, value in cfg.items() if key != OPTIONS}
        self._options = dict(cfg.get(OPTIONS) or {})

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        """Return the callback."""
        return [PreflightCallback(run=self._run, trainer="axolotl", **self._options)]
