"""The config that a run keeps is read back as it was, and what followed from others follows again."""

from __future__ import annotations

import ml_collections
import pytest

from configs import asynchrony, quickstart
from rl_code.config import read_config
from rl_code.config.read_config import ConfigError
from rl_code.recording import kept_config
from rl_code.run.config import RunConfig
from rl_code.run.workdir import CONFIG_FILE


@pytest.mark.parametrize("module", [quickstart, asynchrony])
def test_a_kept_config_is_the_config_and_what_followed_follows_again(tmp_path, module):
    config = read_config.build(RunConfig, module.get_config())
    (tmp_path / CONFIG_FILE).write_text(read_config.to_json(config))
    assert read_config.diff(kept_config.read(tmp_path), config) == []
    found = ml_collections.ConfigDict(kept_config.as_written(tmp_path / CONFIG_FILE))
    written = read_config.complete(RunConfig, found)
    assert read_config.diff(read_config.build(RunConfig, written), config) == []
    assert written.protocol == "compact" and written.tasks.name == "generated"
    # a value that followed from another follows from the changed one; one that was set stays
    written.train.group_size = 4
    changed = read_config.build(RunConfig, written)
    fresh = module.get_config()
    fresh.train.group_size = 4
    assert read_config.diff(changed, read_config.build(RunConfig, fresh)) == []


def test_a_folder_without_a_config_is_said(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: .* name the workdir of a"):
        kept_config.read(tmp_path)
