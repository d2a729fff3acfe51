//! Generator of one image: a colored shape on a dark gray background.

use super::rng::Rng;
use crate::commands::synth::png;

/// Width and height in pixels: one slice of the demo model.
const SIZE: usize = 56;

/// Names and RGB values of the colors.
pub(super) const COLOURS: [(&str, [u8; 3]); 8] = [
    ("red", [220, 40, 40]),
    ("green", [40, 180, 60]),
    ("blue", [50, 80, 220]),
    ("yellow", [230, 210, 50]),
    ("purple", [150, 60, 180]),
    ("orange", [240, 140, 40]),
    ("cyan", [60, 200, 210]),
    ("white", [240, 240, 240]),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shape {
    Circle,
    Square,
    Triangle,
    Cross,
}

impl Shape {
    const ALL: [Self; 4] = [Self::Circle, Self::Square, Self::Triangle, Self::Cross];

    /// Whether the point (x, y), relative to the center, is inside the shape with radius `radius`.
    fn holds(self, x: f64, y: f64, radius: f64) -> bool {
        match self {
            Self::Circle => x * x + y * y < radius * radius,
            Self::Square => x.abs() < 0.85 * radius && y.abs() < 0.85 * radius,
            Self::Triangle => y < 0.8 * radius && y > -radius && x.abs() < 0.55 * (y + radius),
            Self::Cross => {
                let bar =
                    |along: f64, across: f64| along.abs() < radius && across.abs() < 0.3 * radius;
                bar(x, y) || bar(y, x)
            }
        }
    }
}

/// Draws a PNG image of a shape with color `colour`, an index of [`COLOURS`].
pub(super) fn draw(colour: usize, rng: &mut Rng) -> Vec<u8> {
    let shape = Shape::ALL[rng.below(4) as usize];
    let ground = rng.below(61) as u8;
    let radius = rng.between(5.0, 8.0);
    // Position inside one of nine cells, so the shape is never cut off.
    let mut centre = || 9.3 + 18.6 * f64::from(rng.below(3)) + rng.between(-2.0, 2.0);
    let (centre_x, centre_y) = (centre(), centre());
    let pixels: Vec<bool> = (0..SIZE * SIZE)
        .map(|index| {
            let (x, y) = ((index % SIZE) as f64, (index / SIZE) as f64);
            shape.holds(x - centre_x, y - centre_y, radius)
        })
        .collect();
    png::encode(SIZE, &pixels, [[ground; 3], COLOURS[colour].1])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_shows_its_color_on_a_dark_background() {
        for index in 0..64 {
            let colour = index % COLOURS.len();
            let file = draw(colour, &mut Rng::new(7, index as u64));
            let image = image::load_from_memory(&file)
                .expect("a PNG file")
                .to_rgb8();
            assert_eq!(image.dimensions(), (56, 56));
            let coloured = image
                .pixels()
                .filter(|pixel| pixel.0 == COLOURS[colour].1)
                .count();
            assert!((30..260).contains(&coloured), "{coloured} pixels");
            let rest = image
                .pixels()
                .filter(|pixel| pixel.0.iter().all(|&value| value <= 60))
                .count();
            assert_eq!(coloured + rest, SIZE * SIZE);
        }
    }

    #[test]
    fn shapes_differ_in_area() {
        let area = |shape: Shape| {
            (0..400)
                .filter(|i| shape.holds(f64::from(i % 20) - 10.0, f64::from(i / 20) - 10.0, 8.0))
                .count()
        };
        let areas: Vec<_> = Shape::ALL.map(area).to_vec();
        assert!(areas.windows(2).all(|pair| pair[0] != pair[1]), "{areas:?}");
    }
}
