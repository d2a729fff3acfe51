"""Tests of the check of dependencies."""

import unittest

from dependencies import TWICE, allowed, problems


def package(name, version="1.0.0", license="MIT"):
    return {"name": name, "version": version, "license": license}


class Dependencies(unittest.TestCase):
    def test_an_expression_is_met_by_one_of_its_alternatives(self):
        for expression in ["MIT", "GPL-3.0 OR MIT", "Unlicense/MIT", "(MIT OR GPL-3.0) AND Unicode-3.0",
                           "Apache-2.0 WITH LLVM-exception OR GPL-2.0"]:
            self.assertTrue(allowed(expression), expression)
        for expression in ["GPL-3.0", "none", "MIT AND GPL-3.0", "(MIT OR Apache-2.0) AND MPL-2.0"]:
            self.assertFalse(allowed(expression), expression)

    def test_licenses_and_second_versions_are_found(self):
        known = [package(name, version) for name in TWICE for version in ["1.0.0", "2.0.0"]]
        self.assertEqual(problems(known), [])
        found = problems(known + [package("a", license="GPL-3.0"), package("b"), package("b", "2.0.0")])
        self.assertEqual([line.split()[0] for line in found], ["a", "b"])
        self.assertEqual(len(problems(known[2:])), 1)


if __name__ == "__main__":
    unittest.main()
