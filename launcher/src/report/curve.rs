//! Loss curve as SVG: raw values, their moving average, axes with round numbers.

use std::fmt::Write;

use super::axis::Axis;

/// Training loss at one step: a point of the loss curve.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point {
    /// Number of training steps (optimizer updates) completed since the start of the run.
    pub step: u64,
    /// Training loss at that step.
    pub loss: f64,
}

const WIDTH: f64 = 800.0;
const HEIGHT: f64 = 450.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 44.0;
const BOTTOM: f64 = 48.0;
const RAW: &str = "#9db8d9";
const SMOOTH: &str = "#1f4e9c";
/// Maximum points drawn; more would not be visible.
const MOST_POINTS: usize = 2000;

/// SVG document of the loss curve: the given losses by step, and their moving average. Values that are not
/// finite are left out.
pub fn loss_curve(points: &[Point]) -> String {
    let finite: Vec<Point> = points
        .iter()
        .copied()
        .filter(|point| point.loss.is_finite())
        .collect();
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\" fill=\"#444\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"{LEFT}\" y=\"24\" font-size=\"16\" fill=\"#111\">training loss</text>\n"
    );
    if finite.is_empty() {
        push(
            &mut svg,
            format_args!(
                "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">no steps yet</text>\n</svg>\n",
                WIDTH / 2.0,
                HEIGHT / 2.0
            ),
        );
        return svg;
    }
    let frame = Frame::around(&finite);
    frame.draw_axes(&mut svg);
    let smooth = smoothed(&finite);
    let thin = finite.len().div_ceil(MOST_POINTS);
    frame.draw_line(&mut svg, finite.iter().step_by(thin).copied(), RAW, 1.2);
    frame.draw_line(&mut svg, smooth.iter().step_by(thin).copied(), SMOOTH, 2.2);
    draw_legend(&mut svg);
    svg += "</svg>\n";
    svg
}

/// Exponential moving average with bias correction. Its time constant grows with the number of points.
pub(super) fn smoothed(points: &[Point]) -> Vec<Point> {
    let keep = 1.0 - 1.0 / (1.0 + points.len() as f64 / 25.0);
    let (mut sum, mut weight) = (0.0, 0.0);
    points
        .iter()
        .map(|point| {
            sum = keep * sum + (1.0 - keep) * point.loss;
            weight = keep * weight + (1.0 - keep);
            Point {
                step: point.step,
                loss: sum / weight,
            }
        })
        .collect()
}

struct Frame {
    x: Axis,
    y: Axis,
}

impl Frame {
    fn around(points: &[Point]) -> Self {
        let low = points
            .iter()
            .map(|point| point.loss)
            .fold(f64::INFINITY, f64::min);
        let high = points
            .iter()
            .map(|point| point.loss)
            .fold(f64::NEG_INFINITY, f64::max);
        let last = points.last().map_or(1, |point| point.step) as f64;
        // The axis includes zero unless that would flatten the curve.
        let low = if low > 0.0 && low < 0.6 * high {
            0.0
        } else {
            low
        };
        Self {
            x: Axis::nice(0.0, last, 8.0, true),
            y: Axis::nice(low, high, 6.0, false),
        }
    }

    fn at(&self, point: Point) -> (f64, f64) {
        (
            LEFT + self.x.share(point.step as f64) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - self.y.share(point.loss) * (HEIGHT - TOP - BOTTOM),
        )
    }

    fn draw_axes(&self, svg: &mut String) {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        let digits = self.y.digits();
        for value in self.y.marks() {
            let y = bottom - self.y.share(value) * (bottom - TOP);
            push(
                svg,
                format_args!(
                    "<line x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#e6e6e6\"/>\n<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{value:.digits$}</text>\n",
                    LEFT - 8.0,
                    y + 4.0
                ),
            );
        }
        for value in self.x.marks() {
            let x = LEFT + self.x.share(value) * (right - LEFT);
            push(
                svg,
                format_args!(
                    "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{bottom}\" y2=\"{}\" stroke=\"#888\"/>\n<text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{value:.0}</text>\n",
                    bottom + 5.0,
                    bottom + 19.0
                ),
            );
        }
        push(
            svg,
            format_args!(
                "<path d=\"M{LEFT} {TOP}V{bottom}H{right}\" fill=\"none\" stroke=\"#888\"/>\n<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">step</text>\n",
                (LEFT + right) / 2.0,
                HEIGHT - 10.0
            ),
        );
    }

    fn draw_line(
        &self,
        svg: &mut String,
        points: impl Iterator<Item = Point>,
        colour: &str,
        width: f64,
    ) {
        let places: Vec<(f64, f64)> = points.map(|point| self.at(point)).collect();
        if let [(x, y)] = places[..] {
            push(
                svg,
                format_args!(
                    "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{}\" fill=\"{colour}\"/>\n",
                    1.0 + width
                ),
            );
            return;
        }
        let path: Vec<String> = places
            .iter()
            .map(|(x, y)| format!("{x:.1},{y:.1}"))
            .collect();
        push(
            svg,
            format_args!(
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\" stroke-linejoin=\"round\"/>\n",
                path.join(" ")
            ),
        );
    }
}

fn draw_legend(svg: &mut String) {
    for (x, colour, name) in [
        (WIDTH - 220.0, RAW, "loss"),
        (WIDTH - 140.0, SMOOTH, "moving average"),
    ] {
        push(
            svg,
            format_args!(
                "<line x1=\"{x}\" x2=\"{}\" y1=\"20\" y2=\"20\" stroke=\"{colour}\" stroke-width=\"3\"/>\n<text x=\"{}\" y=\"24\">{name}</text>\n",
                x + 20.0,
                x + 26.0
            ),
        );
    }
}

fn push(svg: &mut String, text: std::fmt::Arguments<'_>) {
    svg.write_fmt(text)
        .expect("writing into a string cannot fail");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_constant_loss_and_a_single_step_can_be_drawn() {
        for points in [
            vec![Point { step: 1, loss: 2.0 }],
            vec![Point { step: 1, loss: 0.0 }, Point { step: 2, loss: 0.0 }],
        ] {
            let svg = loss_curve(&points);
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
        assert!(loss_curve(&[]).contains("no steps yet"));
    }

    #[test]
    fn values_that_are_not_finite_are_left_out() {
        let points = [
            Point { step: 1, loss: 1.0 },
            Point {
                step: 2,
                loss: f64::NAN,
            },
            Point { step: 3, loss: 0.5 },
        ];
        let svg = loss_curve(&points);
        let raw = svg
            .lines()
            .find(|line| line.contains(RAW) && line.contains("polyline"))
            .expect("a line");
        assert_eq!(raw.matches(',').count(), 2);
    }

    #[test]
    fn the_moving_average_starts_at_the_first_value_and_is_smoother() {
        let points: Vec<Point> = (0..100)
            .map(|step| Point {
                step,
                loss: if step % 2 == 0 { 1.0 } else { 3.0 },
            })
            .collect();
        let smooth = smoothed(&points);
        assert_eq!(smooth[0].loss, 1.0);
        assert!(
            smooth[50..]
                .iter()
                .all(|point| (1.6..2.4).contains(&point.loss))
        );
    }
}
