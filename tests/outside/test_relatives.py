"""Loss and gradients of families without a record equal those of transformers, in float64."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import record_transformers as record  # noqa: E402
import transformers_records as records  # noqa: E402

LAYOUTS = {
    "one device": {},
    "pp 2, tp 2": {"pp": 2, "tp": 2, "schedule": "zb_h1", "sequence_parallel": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", record.RELATIVES)
def test_loss_and_every_gradient(name, layout):
    wanted, arrays = record.first_step(name)
    kept = records.Record(arrays)
    loss, gradients = records.loss_and_gradients(kept, LAYOUTS[layout])
    np.testing.assert_allclose(loss, wanted, rtol=1e-13)
    model = records.trainer_of(kept, {}).config.model
    assert name.startswith(model.family)
    want = kept.by_our_names("gradients", model)
    # A choice of entries has no gradient, so what makes it is frozen.
    want = {path: gradient for path, gradient in want.items() if "indexer" not in path}
    assert gradients.keys() == want.keys()
    for path, expected in want.items():
        largest = np.abs(expected).max()
        assert largest > 1e-4, path
        np.testing.assert_allclose(
            gradients[path] / largest, expected / largest, rtol=0, atol=1e-12
        )
