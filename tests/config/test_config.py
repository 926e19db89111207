"""Reading and checking configurations: every error is one sentence with its place and remedy."""

from pathlib import Path

import jax
import msgspec
import pytest
from resolving import resolved

from jaxpipe.config import Config, ConfigError, from_builtins, load, to_toml
from jaxpipe.model import FAMILIES, PRESETS
from jaxpipe.planning import Devices

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))
CONFIGS = [path for path in CONFIGS if not path.stem.endswith("_plan")]  # too wide to train yet

BASE = (Path(__file__).parents[1] / "data" / "base.toml").read_text()


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(BASE)
    return path


def test_reads_overrides_and_names_the_run(path):
    config = load(path, ["parallel.pp=4", "parallel.schedule=gpipe", "optimizer.lr = 1e-2"])
    assert (config.parallel.pp, config.parallel.schedule, config.optimizer.lr) == (4, "gpipe", 0.01)
    assert config.run.dir == "runs/small"
    resolved(load(path, ["parallel.schedule=1F1B"]), count=2)
    assert load(path, ["run.dir=/tmp/x y"]).run.dir == "/tmp/x y"
    assert load(path, ["parallel.layer_split=[3,1]"]).parallel.layer_split == (3, 1)
    resolved(config, count=4)


def test_a_saved_configuration_may_have_older_names(path):
    config = load(path, ["parallel.cp=2"])
    saved = msgspec.to_builtins(config)
    saved["parallel"]["sdp"] = saved["parallel"].pop("cp")
    saved["parallel"]["defer_ends"] = saved["parallel"].pop("defer_embed_head")
    saved["optimizer"]["decay_of_ends"] = saved["optimizer"].pop("decay_of_embed_head")
    assert from_builtins(saved) == config


def test_round_trip(path, tmp_path):
    sources = "data.sources=[{path='a', weight=2}, {path='b'}]"
    config = load(path, ["parallel.layer_split=[3,1]", "data.heldout_fraction=0.1", sources])
    again = tmp_path / "again.toml"
    again.write_text(to_toml(config))
    assert load(again) == config


PARAMETERS = {
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_1_8b": 8_030_261_248,
    "llama3_1_70b": 70_553_706_496,
    "llama3_1_405b": 405_853_388_800,
    "llama3_2_1b": 1_235_814_400,
    "llama3_2_3b": 3_212_749_824,
    "llama3_debugmodel": 6_163_712,
    "kempner_13b": 14_840_386_560,
    "kempner_29b": 28_705_462_272,
    "mistral_7b_v0_1": 7_241_732_096,
    "mistral_7b_v0_3": 7_248_023_552,
    # The published models but the first with 416,866,032 parameters of the vision tower, and
    # 1,152 x (d_model + 1) between both, are 4,300,079,472, 12,187,325,040 and 27,432,406,640.
    "gemma3_1b": 999_885_952,
    "gemma3_4b": 3_880_263_168,
    "gemma3_12b": 11_766_034_176,
    "gemma3_27b": 27_009_346_304,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    "llama4_scout": 107_769_861_120,
    "llama4_maverick": 400_711_848_960,
    "olmo2_7b": 7_298_617_344,
    "olmo2_13b": 13_716_198_400,
    "olmo2_32b": 32_234_279_936,
    "olmo3_7b": 7_298_011_136,
    "olmo3_32b": 32_233_522_176,
    "glm4_32b": 32_566_081_536,
    "glm4_5_air": 106_852_245_504,  # without the layer that predicts a further token, as below
    "glm4_5": 352_797_814_784,
    "minimax_m2": 228_689_748_992,
    "ernie4_5_21b_a3b": 21_825_436_160,
    "ernie4_5_300b_a47b": 299_484_160_000,
    "qwen3_next_80b_a3b": 79_674_391_296,
    "qwen3_5_9b": 8_953_803_264,
    "qwen3_5_35b_a3b": 34_660_610_688,
    "qwen3_5_397b_a17b": 396_346_350_336,
    "seed_oss_36b": 36_151_104_512,
    "exaone4_1_2b": 1_279_391_488,
    "exaone4_32b": 32_003_216_384,
    "phi3_mini": 3_821_079_552,
    "phi4": 14_659_507_200,
    "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_620_634_112,
    "qwen2_5_0_5b": 494_032_768,
    "qwen2_5_1_5b": 1_543_714_304,
    "qwen2_5_3b": 3_085_938_688,
    "qwen2_5_7b": 7_615_616_512,
    "qwen2_5_14b": 14_770_033_664,
    "qwen2_5_32b": 32_763_876_352,
    "qwen2_5_72b": 72_706_203_648,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_debugmodel": 31_987_968,
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v3": 671_026_419_200 - 58 * 256,  # published with the biases of its routers
    "deepseek_v3.2": 671_026_404_352 + 61 * (1536 * 64 * 128 + 7168 * (128 + 64) + 2 * 128),
    "glm5": 743_911_199_232,
    "glm5.2": 743_377_000_704,
    "kimi_k2": 1_026_408_232_448 - 60 * 384,
    "kimi_linear_48b_a3b": 49_122_675_072,  # without the biases of its routers, 26 * 256
    "nemotron_h_8b": 8_100_852_736,
    "olmo_hybrid_7b": 7_430_870_688,
    "bamba_9b": 9_780_235_392,
    "granite_4_h_350m": 340_332_224,
    "nemotron_3_nano_30b_a3b": 31_577_937_344,
    "deepseek_v4_flash": 284_332_230_231,  # without the layer that predicts a further token
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
}
ACTIVE = {
    "qwen3_30b_a3b": 3_353_032_704,
    # The model card's 3.61 B and 5.13 B leave the embedding out, 579,133,440.
    "gpt_oss_20b": 4_187_440_704,
    "gpt_oss_120b": 5_711_982_912,
    "llama4_scout": 17_172_894_720,
    "llama4_maverick": 17_184_691_200,
    "mixtral_8x7b": 12_879_925_248,
    "mixtral_8x22b": 39_152_031_744,
    "glm4_5_air": 13_424_123_904,
    "glm4_5": 33_632_251_904,
    "minimax_m2": 11_030_537_216,
    "ernie4_5_21b_a3b": 3_352_148_480,
    "ernie4_5_300b_a47b": 47_926_583_296,
    "qwen3_next_80b_a3b": 3_874_929_408,
    "qwen3_5_35b_a3b": 3_454_988_928,
    "qwen3_5_397b_a17b": 17_349_040_896,
    "deepseek_v2_lite": 2_661_150_208,
    "deepseek_v3": 37_552_282_624,
    "deepseek_v3.2": 38_403_807_488,
    "glm5": 41_784_709_632,
    "glm5.2": 41_250_511_104,
    "kimi_k2": 32_861_477_888,
    "kimi_linear_48b_a3b": 3_484_453_248,
    "nemotron_3_nano_30b_a3b": 3_580_073_408,
    "deepseek_v4_flash": 13_799_622_231,
}


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_have_the_published_parameter_counts(path, preset):
    text = BASE[BASE.index("[parallel]") :] + f'[model]\npreset = "{preset}"\n'
    path.write_text(text)
    assert load(path).model.parameter_count() == PARAMETERS[preset]
    assert load(path, ["model.n_layers=2"]).model.n_layers == 2
    active = ACTIVE.get(preset, PARAMETERS[preset])
    assert load(path).model.active_parameter_count() == active


@pytest.mark.parametrize(
    ("preset", "copies", "published"),
    [
        ("glm4_5_air", 2, 110_468_824_832),
        ("glm4_5", 2, 358_337_791_296),
        ("glm5.2", 0, 753_329_940_480),
    ],
)
def test_published_files_of_a_model_that_predicts(preset, copies, published):
    """They also hold the biases of routers, and some hold copies of embedding and head."""
    fields = PRESETS[preset] | {"mtp_depth": 1}
    model = FAMILIES[fields["family"]].config(**fields)
    biases = len(model.sparse_layers) * model.n_experts
    copied = copies * model.vocab_size * model.d_model
    assert model.parameter_count() + biases + copied == published


@pytest.mark.extended(unless=["quickstart*", "llama3_8b_pp4"])
@pytest.mark.parametrize("shipped", CONFIGS, ids=lambda shipped: shipped.stem)
def test_shipped_configurations_are_valid(shipped):
    config = load(shipped)
    parallel = config.parallel
    every = parallel.pp * parallel.dp * parallel.tp
    resolved(config, count=config.runtime.cpu_devices or every, per_host=8)


def test_layers_are_gathered_anew_where_no_pipeline_pays_for_it(path):
    """By default it is off under pp, where every microbatch would gather the layers again."""
    for how, reshards in (
        (["parallel.pp=1"], False),
        (["parallel.pp=1", "parallel.zero_stage=3"], True),
        (["parallel.pp=1", "parallel.zero_stage=3", "parallel.reshard_after_forward=false"], False),
        (["parallel.zero_stage=3"], False),
        (["parallel.zero_stage=3", "parallel.reshard_after_forward=true"], True),
    ):
        config = load(path, how)
        resolved(config)
        assert config.parallel.reshards == reshards


def test_underfilled_schedules_can_be_allowed(path):
    few = "train.grad_accum_steps=1"
    resolved(load(path, [few, "parallel.allow_underfilled=true"]), count=2)
    resolved(load(path, [few, "parallel.schedule=gpipe"]), count=2)


def test_the_example_to_start_from_is_where_it_is_named(tmp_path, monkeypatch):
    """In a checkout, and where only the package is installed."""
    for named in (r"configs/quickstart\.toml", r"/.*/jaxpipe/examples/quickstart\.toml"):
        with pytest.raises(ConfigError, match=rf"a TOML file, such as {named}\.$") as raised:
            load("none.toml")
        assert Path(str(raised.value).rpartition(" ")[2][:-1]).exists()
        monkeypatch.chdir(tmp_path)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the configuration .*none.toml"):
        load(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[model\n")
    with pytest.raises(ConfigError, match="broken.toml is not valid TOML: .*line 1"):
        load(broken)


def test_a_missing_key_is_named(path):
    path.write_text(BASE.replace("seq_len = 32", ""))
    with pytest.raises(ConfigError, match="train.seq_len is missing: give it a value"):
        load(path)


def test_a_key_of_a_missing_section_is_named(path):
    path.write_text(BASE[: BASE.index("[train]")])
    with pytest.raises(ConfigError, match="train.steps is missing: give it a value"):
        load(path)


def test_configurations_compare_by_value(path):
    assert load(path) == load(path)
    assert isinstance(load(path), Config)
    assert hash(load(path).model) == hash(load(path).model)


@pytest.mark.parametrize("platform", ["gpu", "cuda"])
def test_fused_attention_needs_a_gpu(platform):
    small = Path(__file__).parents[1] / "data" / "small.toml"
    given = ["model.attention=cudnn", "train.compute_dtype=bfloat16"]
    resolved(load(small, given), platform=platform)
    with pytest.raises(ConfigError, match="needs an NVIDIA GPU and cuDNN.*set model.attention=xla"):
        resolved(load(small, given), platform="cpu")
    for other, message in (
        ("train.compute_dtype=float32", "these are float32 of width 8: .*set model.attention=xla"),
        ("model.head_dim=12", "these are bfloat16 of width 12"),
        ("train.deterministic=true", "train.deterministic=true with .*set model.attention=xla"),
    ):
        with pytest.raises(ConfigError, match=message):
            resolved(load(small, [*given, other]), platform=platform)


def test_packed_rows_with_fused_attention_need_a_hopper():
    given = ["model.attention=cudnn", "data.packing=sequential", "train.compute_dtype=bfloat16"]
    small = Path(__file__).parents[1] / "data" / "small.toml"
    config = load(small, given)
    resolved(config, platform="cuda")
    with pytest.raises(ConfigError, match=r"takes bfloat16 or float16, .* these are float32 of"):
        resolved(load(small, given[:-1]))
    long = ["model.max_seq_len=0", "train.seq_len=65536", "train.microbatch_size=1024"]
    with pytest.raises(ConfigError, match=r"1024 rows of 65536 tokens with .* are 2\^31 or more"):
        resolved(load(small, [*given, *long]))
    with pytest.raises(ConfigError, match=r"compute capability 9.0 .* but these have 8.0"):
        resolved(config, platform="cuda", capability=8.0)


def test_no_device_here_has_a_compute_capability():
    assert Devices.present(jax.devices()).capability is None
