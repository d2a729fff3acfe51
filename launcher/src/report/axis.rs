//! Chart axes with round numbers.

/// Range of values with a round step between marks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Axis {
    low: f64,
    high: f64,
    step: f64,
}

impl Axis {
    /// Smallest range of round numbers that contains `low..=high`, with about `marks` marks.
    pub(super) fn nice(low: f64, high: f64, marks: f64, whole: bool) -> Self {
        let span = if high > low {
            high - low
        } else {
            high.abs().max(1.0)
        };
        let raw = span / marks;
        let power = 10f64.powf(raw.log10().floor());
        let factor = [1.0, 2.0, 2.5, 5.0, 10.0]
            .into_iter()
            .find(|factor| factor * power >= raw * 0.999);
        let mut step = factor.unwrap_or(10.0) * power;
        if whole {
            step = step.ceil().max(1.0);
        }
        let low = (low / step).floor() * step;
        let high = ((high / step).ceil() * step).max(low + step);
        Self { low, high, step }
    }

    /// Values at the axis's tick marks, in ascending order.
    pub(super) fn marks(&self) -> impl Iterator<Item = f64> + '_ {
        let count = ((self.high - self.low) / self.step).round() as u64;
        (0..=count).map(|mark| self.low + mark as f64 * self.step)
    }

    /// Position of a value along the axis, as a share of its length: 0 at the lower end, 1 at the upper end.
    pub(super) fn share(&self, value: f64) -> f64 {
        (value - self.low) / (self.high - self.low)
    }

    /// Number of decimal digits that the labels need to distinguish the marks.
    pub(super) fn digits(&self) -> usize {
        let mut digits = 0;
        let mut step = self.step;
        while digits < 8 && (step - step.round()).abs() > 1e-6 * step {
            step *= 10.0;
            digits += 1;
        }
        digits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marks(low: f64, high: f64, whole: bool) -> Vec<f64> {
        Axis::nice(low, high, 6.0, whole)
            .marks()
            .map(|mark| (mark * 1e6).round() / 1e6)
            .collect()
    }

    #[test]
    fn axis_ticks_are_round_numbers_and_cover_the_values() {
        assert_eq!(marks(0.0, 5.7, false), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        assert_eq!(
            marks(0.0, 240.0, true),
            [0.0, 50.0, 100.0, 150.0, 200.0, 250.0]
        );
        assert_eq!(marks(0.0, 3.0, true), [0.0, 1.0, 2.0, 3.0]);
        assert_eq!(marks(1.31, 1.39, false).len(), 6);
        assert_eq!(Axis::nice(0.0, 0.3, 6.0, false).digits(), 2);
    }
}
