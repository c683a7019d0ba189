"""Errors cross process borders and must keep saying what, where and why."""

import pickle

import pytest

from stoker.coldstart import failures
from stoker.coldstart.failures import ColdStartError, ObjectAltered, ObjectMissing


def test_message_names_object_range_reason_and_remedy():
    error = ObjectAltered("s3://b/model.safetensors", (4096, 8192), "its checksum differs")
    assert str(error).startswith("s3://b/model.safetensors bytes 4096-8191: its checksum differs; ")
    assert "publish the model again" in str(error)
    assert str(ObjectMissing("x", None, "gone")).startswith("x: gone; ")


def test_as_dict_is_plain_data():
    fields = ObjectAltered("x", (0, 2), "why").as_dict()
    assert fields["type"] == "ObjectAltered" and fields["range"] == [0, 2]
    assert fields["object"] == "x" and fields["reason"] == "why" and "bytes 0-1" in fields["message"]


@pytest.mark.parametrize("kind", ColdStartError.__subclasses__(), ids=lambda kind: kind.__name__)
def test_survives_pickling(kind: type[ColdStartError]):
    error = pickle.loads(pickle.dumps(kind("x", (1, 2), "why")))
    assert type(error) is kind and error.as_dict() == kind("x", (1, 2), "why").as_dict()
    assert getattr(failures, kind.__name__) is kind
