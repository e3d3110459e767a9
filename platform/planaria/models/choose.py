"""Which of the platform's own recipes a job's model section asks for."""

from __future__ import annotations

from transformers import PreTrainedConfig

from planaria.config import JobConfig, ModelConfig
from planaria.models.build import hf_config
from planaria.models.dual import DualEncoderRecipe
from planaria.models.dual_config import CLASSES, model_type
from planaria.models.vlm import VLMRecipe


def job_recipe(job: JobConfig) -> VLMRecipe | DualEncoderRecipe:
    """The recipe for ``job``: dual encoders by their model type, everything else as a vision-language model.

    Raises:
        ConfigError: the job has no model section, or its data do not fit the model.
    """
    return DualEncoderRecipe(job) if model_type(job.model) in CLASSES else VLMRecipe(job)


def directory_config(path: str) -> PreTrainedConfig:
    """The config of a local Hugging Face directory, of any kind that a job can train; raises ``ConfigError``."""
    model = ModelConfig(path=path, preset=None, config=None)
    kind = model_type(model)
    if kind in CLASSES:
        config: PreTrainedConfig = CLASSES[kind][0].from_pretrained(path, local_files_only=True)
        return config
    return hf_config(model, vocab_size=0, image_token_id=0)
