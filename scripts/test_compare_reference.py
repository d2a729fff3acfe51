"""Tests of the comparison with published code and peft, with a stand-in for both."""

import contextlib
import io
import json
import tempfile
import unittest
from pathlib import Path

import reference_families
from compare_reference import conversation, main, read_samples
from reference_families import (
    FAMILIES, IGNORED, Cog, Glm, MiniCpm, Reference, Refused, Sample, expanded, labels_of, parts, prompt, shifted_labels
)

ANSWER = {"role": "assistant", "content": "A cat."}


class Labels(list):
    """Labels with as much of a tensor as the script uses."""

    def __ne__(self, other):
        return Labels(label != other for label in self)

    def sum(self):
        return sum(self)


class StandIn(Reference):
    """A reference that computes nothing."""

    remote = False

    def __init__(self, directory, device):
        self.directory, self.device = directory, device

    def encode(self, sample):
        answers = sum(message["role"] == "assistant" for message in sample.messages)
        inputs = {"images": len(sample.images), "switch": sample.thinking}
        return inputs, Labels([IGNORED, IGNORED] + [7] * answers)

    def case(self, inputs, labels):
        return {"inputs": inputs, "labels": labels}

    def lora_steps(self, samples, options, pack):
        return {"losses": [1.0] * options.steps, "grad_norms": [0.5] * options.steps, "loss_after": 0.25}

    @staticmethod
    def save(tensors, path):
        path.write_text(json.dumps(tensors))


class Cells:
    """Placeholders as MiniCPM's processor of images writes them: a sliced image is wider than high."""

    use_image_id, max_slice_nums = True, 9

    def get_sliced_grid(self, size, most):
        return [2, 1] if size[0] > size[1] and most == 9 else None

    def get_slice_image_placeholder(self, size, number, use_image_id):
        return (f"[{number}]" if use_image_id else "") + f"({size[0]})"


class Plain:
    """A tokenizer whose template is one line per message."""

    all_special_tokens = ["<unk>", "<image>"]

    def apply_chat_template(self, messages, **_):
        return "|".join(f"{m['role']}:{m['content']}" for m in messages)


def mini():
    """MiniCPM without a model."""
    model = object.__new__(MiniCpm)
    model.images, model.tokenizer, model.thinks = Cells(), Plain(), False
    return model


class Samples(unittest.TestCase):
    def test_every_spelling_of_a_sample_gives_the_same_conversation(self):
        expected = Sample([{"role": "user", "content": "<image>\nWhat?"}, ANSWER], ["cat.jpg"])
        asked = {"role": "user", "content": "<image>\nWhat?"}
        for sample in [
            {"image": "cat.jpg", "conversations": [asked, ANSWER]},
            {"images": ["cat.jpg"], "messages": [asked, ANSWER]},
            {"image": {"<image_00>": "cat.jpg"},
             "conversations": [{"role": "user", "content": "<image_00>\nWhat?"}, ANSWER]},
            {"image": "cat.jpg", "conversations": [{"from": "human", "value": "<image>\nWhat?"},
                                                   {"from": "gpt", "value": "A cat."}]},
        ]:
            read = conversation(sample, 0)
            self.assertEqual(read.named, isinstance(sample.get("image"), dict))
            read.named = False
            self.assertEqual(read, expected)

    def test_images_are_taken_in_the_order_of_their_marks(self):
        sample = {"image": {"<image_00>": "a", "<image_01>": "b"},
                  "conversations": [{"role": "user", "content": "<image_01> or <image_00>?"}, ANSWER]}
        read = conversation(sample, 0)
        self.assertEqual((read.messages[0]["content"], read.images), ("<image> or <image>?", ["b", "a"]))
        self.assertTrue(read.named)

    def test_a_single_image_without_a_mark_stands_before_the_text(self):
        turns = [{"role": "system", "content": "Short."}, {"role": "user", "content": "What?"}, ANSWER]
        for image in ["cat.jpg", {"<image_00>": "cat.jpg"}]:
            read = conversation({"image": image, "conversations": turns}, 0)
            self.assertEqual([m["content"] for m in read.led()], ["Short.", "<image>What?", "A cat."])
            self.assertEqual([m["content"] for m in read.unmarked()], ["Short.", "What?", "A cat."])
            self.assertEqual((read.images, read.named), (["cat.jpg"], False))

    def test_the_line_break_next_to_a_mark_goes_with_it(self):
        for content in ["<image>\nWhat?", "What?\n<image>", "<image>What?"]:
            sample = Sample([{"role": "user", "content": content}], ["cat.jpg"])
            self.assertEqual(sample.unmarked()[0]["content"], "What?")

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
        self.assertRaises(Refused, model.encode, Sample([ANSWER], [], False))

    def test_templates_get_texts_and_images_in_their_order(self):
        text, image = {"type": "text", "text": "a"}, {"type": "image"}
        expected = {"<image>a<image>": [image, text, image], "a": [text], "a<image>a": [text, image, text]}
        for content, expected in expected.items():
            self.assertEqual(parts({"role": "user", "content": content}), {"role": "user", "content": expected})

    def test_every_published_name_is_covered(self):
        native = sorted(name for name, family in FAMILIES.items() if not family.remote)
        self.assertEqual(native, ["glm46v", "glm4v", "glm_ocr"])
        remote = sorted(set(FAMILIES) - set(native))
        self.assertEqual(remote, ["CogAgentForCausalLM", "CogVLMForCausalLM", "chatglm", "minicpmo", "minicpmv"])

    def test_labels_of_minicpm_are_shifted_and_end_twice(self):
        start, end, assistant, no = 1, 2, 3, IGNORED
        ids = [start, 9, 10, end, start, assistant, 10, 20, 21, end, 10]
        self.assertEqual(shifted_labels(ids, start, assistant, end), [no] * 6 + [20, 21, end, end, no])
        # Without the mark of a turn the word opens no answer; the last answer alone leaves an empty thought out.
        self.assertEqual(shifted_labels([9, assistant, 10, 20, end], start, assistant, end), [no] * 5)
        two = [start, assistant, 10, 20, end, start, assistant, 10, 7, 8, 21, end]
        labels = shifted_labels(two, start, assistant, end, 2)
        self.assertEqual(labels, [no, no, 20, end, end, no, no, no, no, 21, end, no])

    def test_images_of_minicpm_have_numbers_only_where_they_are_sliced(self):
        sample = Sample([{"role": "user", "content": "<image>a<image><image>"}], ["x", "y", "z"], named=True)
        text = mini().text(sample, [(9, 1), (1, 9), (8, 1)])
        self.assertEqual(text, "user:\n[0](9)\na\n(1)\n\n[1](8)\n")
        for content, expected in {"a <image> b": "user:a (1) b", "a": "user:(1)\na"}.items():
            sample = Sample([{"role": "user", "content": content}], ["x"])
            self.assertEqual(mini().text(sample, [(1, 9)]), expected)

    def test_a_sample_of_minicpm_is_stored_as_its_training_script_reads_it(self):
        asked = [{"role": "user", "content": "<image> or <image>?"}]
        row = mini().layout(Sample(asked, ["a", "b"], named=True), ["0.png", "1.png"])["conversation.json"][0]
        self.assertEqual(row["image"], {"<image_00>": "0.png", "<image_01>": "1.png"})
        self.assertEqual(row["conversations"][0]["content"], "<image_00> or <image_01>?")
        row = mini().layout(Sample(asked[:1], ["a"], True), ["0.png"])["conversation.json"][0]
        self.assertEqual((row["image"], row["enable_thinking"]), ("0.png", True))

    def test_what_a_family_does_not_take_is_refused_before_it_runs(self):
        for content in ["<unk>", "a<unk>b"]:
            self.assertRaises(Refused, mini().encode, Sample([{"role": "user", "content": content}, ANSWER], []))
        cog = object.__new__(Cog)
        cog.tokenizer = Plain()
        asked = {"role": "user", "content": "What?"}
        for messages, images in [([ANSWER], []), ([asked, asked, ANSWER], []), ([asked, ANSWER], ["a", "b"])]:
            self.assertRaises(Refused, cog.encode, Sample(messages, images))

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
        known = dict(reference_families.FAMILIES)
        self.addCleanup(lambda: reference_families.FAMILIES.update(known))
        reference_families.FAMILIES["glm4v"] = StandIn

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

    def test_code_of_a_model_runs_only_when_it_is_there_and_trusted(self):
        status, said = self.run_main("minicpmv", "--trust-remote-code")
        self.assertEqual((status, "modeling.Model" in said), (2, True), "its file is absent")
        (self.place / "model/modeling.py").write_text("")
        status, said = self.run_main("minicpmv")
        self.assertEqual((status, "minicpmv" in said), (2, True))
        self.assertIn(f"launcher eval --model {self.place / 'model'}", said)
        self.assertIn("--trust-remote-code", said)
        self.assertFalse((self.place / "pack").exists())

        class Remote(StandIn):
            remote = True

        reference_families.FAMILIES["minicpmv"] = Remote
        self.assertEqual(self.run_main("minicpmv", "--trust-remote-code")[0], 0)

    def test_an_unknown_model_is_refused_with_the_known_ones(self):
        status, said = self.run_main("llava")
        self.assertEqual((status, "llava" in said, "minicpmo" in said), (2, True, True))

    def test_the_limit_counts_samples(self):
        self.run_main("glm4v", "--limit", "1")
        self.assertEqual(len(list((self.place / "pack/cases").iterdir())), 1)
        self.assertEqual(len(read_samples(self.place / "train.json", 9)), 2)


if __name__ == "__main__":
    unittest.main()
