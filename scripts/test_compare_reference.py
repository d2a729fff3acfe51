"""Tests of the comparison with transformers and peft, with a stand-in for both."""

import contextlib
import io
import json
import tempfile
import unittest
from pathlib import Path

import compare_reference
from compare_reference import (
    FAMILIES, IGNORED, Glm, Refused, conversation, expanded, labels_of, main, parts, prompt, read_samples
)

ANSWER = {"role": "assistant", "content": "A cat."}


class Labels(list):
    """Labels with as much of a tensor as the script uses."""

    def __ne__(self, other):
        return Labels(label != other for label in self)

    def sum(self):
        return sum(self)


class StandIn:
    """A reference that computes nothing."""

    def __init__(self, directory, device):
        self.directory, self.device = directory, device

    def encode(self, messages, paths, enable_thinking=None):
        answers = sum(message["role"] == "assistant" for message in messages)
        return {"images": len(paths), "switch": enable_thinking}, Labels([IGNORED, IGNORED] + [7] * answers)

    def case(self, inputs, labels):
        return {"inputs": inputs, "labels": labels}

    def lora_steps(self, samples, options, pack):
        return {"losses": [1.0] * options.steps, "grad_norms": [0.5] * options.steps, "loss_after": 0.25}

    @staticmethod
    def save(tensors, path):
        path.write_text(json.dumps(tensors))


class Samples(unittest.TestCase):
    def test_every_spelling_of_a_sample_gives_the_same_conversation(self):
        expected = ([{"role": "user", "content": "<image>\nWhat?"}, ANSWER], ["cat.jpg"])
        asked = {"role": "user", "content": "<image>\nWhat?"}
        for sample in [
            {"image": "cat.jpg", "conversations": [asked, ANSWER]},
            {"images": ["cat.jpg"], "messages": [asked, ANSWER]},
            {"image": {"<image_00>": "cat.jpg"},
             "conversations": [{"role": "user", "content": "<image_00>\nWhat?"}, ANSWER]},
            {"image": "cat.jpg", "conversations": [{"from": "human", "value": "<image>\nWhat?"},
                                                   {"from": "gpt", "value": "A cat."}]},
        ]:
            self.assertEqual(conversation(sample, 0), expected)

    def test_images_are_taken_in_the_order_of_their_marks(self):
        sample = {"image": {"<image_00>": "a", "<image_01>": "b"},
                  "conversations": [{"role": "user", "content": "<image_01> or <image_00>?"}, ANSWER]}
        messages, images = conversation(sample, 0)
        self.assertEqual((messages[0]["content"], images), ("<image> or <image>?", ["b", "a"]))

    def test_a_single_image_without_a_mark_stands_before_the_text(self):
        turns = [{"role": "system", "content": "Short."}, {"role": "user", "content": "What?"}, ANSWER]
        for image in ["cat.jpg", {"<image_00>": "cat.jpg"}]:
            messages, images = conversation({"image": image, "conversations": turns}, 0)
            self.assertEqual([m["content"] for m in messages], ["Short.", "<image>What?", "A cat."])
            self.assertEqual(images, ["cat.jpg"])

    def test_what_is_not_covered_is_refused(self):
        two = {"<image_00>": "a", "<image_01>": "b"}
        for sample in [
            {"image": "cat.jpg"},
            {"images": ["a", "b"], "messages": [{"role": "user", "content": "What?"}, ANSWER]},
            {"image": two, "conversations": [{"role": "user", "content": "<image_00>?"}, ANSWER]},
            {"image": two, "conversations": [{"role": "user", "content": "<image_00><image_00>"}, ANSWER]},
            {"conversations": [{"role": "tool", "content": "x"}]},
            {"videos": ["film"], "messages": [{"role": "user", "content": "<video>What?"}, ANSWER]},
            {"conversations": [{"role": "user", "content": "<|assistant|>"}, ANSWER]},
        ]:
            self.assertRaises(Refused, conversation, sample, 0)

    def test_labels_cover_answers_and_their_end(self):
        user, assistant, end = 1, 2, 3
        ids = [0, user, 10, assistant, 11, 12, user, 13, assistant, 14, end]
        labels = labels_of(ids, assistant, {user, assistant}, end)
        no = IGNORED
        self.assertEqual(labels, [no, no, no, no, 11, 12, end, no, no, 14, end])

    def test_labels_leave_out_what_the_prompt_gives_of_an_answer(self):
        user, assistant, end, no = 1, 2, 3, IGNORED
        ids = [assistant, 8, 9, 11, user, 10, assistant, 8, 9, 12, end]
        labels = labels_of(ids, assistant, {user, assistant}, end, [8, 9])
        self.assertEqual(labels, [no, no, no, 11, end, no, no, no, no, 12, end])
        self.assertEqual(labels_of([assistant, 8, 10, end], assistant, {assistant}, end, [8, 9]), [no, no, 10, end])

    def test_the_template_decides_where_a_model_has_a_switch_for_thoughts(self):
        class Template:
            def apply_chat_template(self, messages, tokenize, **switch):
                return f"{messages} {switch}"

        model = object.__new__(Glm)
        model.tokenizer, model.thinks = Template(), True
        thought = {"role": "assistant", "content": "<think>So.</think>\nA cat."}
        self.assertEqual(model.text([thought], None), f"{[thought]} {{}}<|endoftext|>")
        said = [{"role": "assistant", "content": "\nA cat."}]
        self.assertEqual(model.text([thought], False), f"{said} {{'enable_thinking': False}}<|endoftext|>")
        model.thinks = False
        self.assertEqual(model.text([ANSWER], None), prompt([ANSWER]))
        self.assertRaises(Refused, model.encode, [ANSWER], [], False)

    def test_templates_get_texts_and_images_in_their_order(self):
        text, image = {"type": "text", "text": "a"}, {"type": "image"}
        expected = {"<image>a<image>": [image, text, image], "a": [text], "a<image>a": [text, image, text]}
        for content, expected in expected.items():
            self.assertEqual(parts({"role": "user", "content": content}), {"role": "user", "content": expected})

    def test_every_published_name_of_the_glm_checkpoints_is_covered(self):
        self.assertEqual(sorted(FAMILIES), ["glm46v", "glm4v", "glm_ocr"])

    def test_an_image_has_its_tokens(self):
        text = prompt([{"role": "user", "content": "<image>a<image>"}, ANSWER])
        self.assertEqual(
            expanded(text, [2, 1]),
            "[gMASK]<sop><|user|>\n<|begin_of_image|><|image|><|image|><|end_of_image|>a"
            "<|begin_of_image|><|image|><|end_of_image|><|assistant|>\nA cat.<|endoftext|>",
        )


class Packs(unittest.TestCase):
    def setUp(self):
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.place = Path(place.name)
        known = dict(compare_reference.FAMILIES)
        self.addCleanup(lambda: compare_reference.FAMILIES.update(known))
        compare_reference.FAMILIES["glm4v"] = StandIn

    def run_main(self, model_type="glm4v", *more):
        (self.place / "model").mkdir(exist_ok=True)
        (self.place / "model/trajectory.json").write_text("of the model")
        config = {"model_type": model_type}
        if model_type != "glm4v":
            config["auto_map"] = {"AutoModel": "modeling.Model"}
        (self.place / "model/config.json").write_text(json.dumps(config))
        (self.place / "cat.png").write_bytes(b"pixels")
        asked = [{"role": "user", "content": "<image>What?"}, ANSWER]
        samples = [{"enable_thinking": False, "image": "cat.png", "conversations": asked},
                   {"conversations": [{"role": "user", "content": "Hello?"}, ANSWER, ANSWER]}]
        (self.place / "train.json").write_text(json.dumps(samples))
        words = [self.place / "model", self.place / "train.json", "--output", self.place / "pack", *more]
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            status = main([str(word) for word in words])
        return status, said.getvalue()

    def test_a_pack_has_samples_results_and_links_to_the_model(self):
        status, said = self.run_main("glm4v", "--steps", "2", "--rank", "4")
        self.assertEqual(status, 0, said)
        self.assertIn("parity -- ", said)
        pack = self.place / "pack"
        self.assertEqual((pack / "config.json").resolve(), (self.place / "model/config.json").resolve())
        self.assertEqual((pack / "cases/sample_0/image_0.png").read_bytes(), b"pixels")
        switched = json.loads((pack / "cases/sample_0/conversation.json").read_text())
        self.assertIs(switched["enable_thinking"], False)
        expected = json.loads((pack / "cases/sample_0/expected.safetensors").read_text())
        self.assertIs(expected["inputs"]["switch"], False)
        stored = json.loads((pack / "cases/sample_1/conversation.json").read_text())
        self.assertEqual((len(stored["messages"]), stored["images"]), (3, []))
        self.assertTrue((pack / "cases/sample_1/expected.safetensors").is_file())
        lora = json.loads((pack / "trajectory.json").read_text())["lora"]
        self.assertEqual((lora["micro_batches"], lora["token_counts"]), (["sample_0", "sample_1"], [1, 2]))
        self.assertEqual((lora["rank"], lora["alpha"], len(lora["losses"]), lora["loss_after"]), (4, 8, 2, 0.25))
        self.assertEqual((self.place / "model/trajectory.json").read_text(), "of the model")
        self.assertEqual(self.run_main()[0], 2, "an existing directory is not written")

    def test_a_model_with_remote_code_is_refused_by_name(self):
        status, said = self.run_main("minicpmv")
        self.assertEqual((status, "minicpmv" in said), (2, True))
        self.assertIn(f"launcher eval --model {self.place / 'model'}", said)
        self.assertIn("trust_remote_code=True", said)
        self.assertFalse((self.place / "pack").exists())

    def test_the_limit_counts_samples(self):
        self.run_main("glm4v", "--limit", "1")
        self.assertEqual(len(list((self.place / "pack/cases").iterdir())), 1)
        self.assertEqual(len(read_samples(self.place / "train.json", 9)), 2)


if __name__ == "__main__":
    unittest.main()
