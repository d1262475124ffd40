//! Draws a profile as an SVG: when which part of the data space was touched first, a band for each layer.

use super::bytes_of;
use layer::LayerId;
use layer::profile::{Profile, Step};
use std::fmt::Write;

const WIDTH: f64 = 900.0;
const LEFT: f64 = 120.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 56.0;
const BAND: f64 = 170.0;
const GAP: f64 = 14.0;
const COLOURS: [&str; 5] = ["#3465a4", "#cc7a29", "#6b8e23", "#8b5a8c", "#b03a3a"];

/// A whole SVG document. Layers that nothing touched have no band.
pub fn draw(name: &str, layers: &[(LayerId, u64)], profile: &Profile, steps: &[Step]) -> String {
    let longest = f64::from(steps.iter().map(|step| step.at_ms).max().unwrap_or(0).max(1));
    let x = |at_ms: u32| LEFT + (WIDTH - LEFT - RIGHT) * f64::from(at_ms) / longest;
    let mut body = String::new();
    let mut top = TOP;
    let touched = layers.iter().filter(|(id, _)| steps.iter().any(|step| step.layer == *id));
    for (index, (id, bytes)) in touched.enumerate() {
        let whole = steps.iter().filter(|step| step.layer == *id);
        let ends = whole.map(|step| bytes_of(step.start_block) + bytes_of(step.blocks));
        // What the profile says may be of an older layer: the band holds all of it.
        let space = ends.max().unwrap_or(0).max(*bytes).max(1) as f64;
        let _ = writeln!(
            body,
            r##"<rect x="{LEFT}" y="{top:.1}" width="{:.1}" height="{BAND}" fill="#f4f4f4"/>"##,
            WIDTH - LEFT - RIGHT
        );
        let _ = writeln!(
            body,
            r#"<text x="{:.0}" y="{:.1}" text-anchor="end">{}</text>"#,
            LEFT - 8.0,
            top + BAND / 2.0,
            id.short()
        );
        for step in steps.iter().filter(|step| step.layer == *id) {
            let y = top + BAND * bytes_of(step.start_block) as f64 / space;
            let height = (BAND * bytes_of(step.blocks) as f64 / space).max(1.0);
            let _ = writeln!(
                body,
                r#"<rect x="{:.1}" y="{y:.2}" width="3" height="{height:.2}" fill="{}"/>"#,
                x(step.at_ms),
                COLOURS[index % COLOURS.len()]
            );
        }
        top += BAND + GAP;
    }
    let bytes: u64 = steps.iter().map(|step| bytes_of(step.blocks)).sum();
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH:.0}\" height=\"{:.0}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"10\" y=\"22\" font-size=\"16\">{}: first touches</text>\n\
         <text x=\"10\" y=\"40\" fill=\"#666666\">{} runs, {} reads, {} bytes; across: time, 0 to \
         {longest:.0} ms; down: offset in each layer's data space</text>\n{body}</svg>\n",
        top + 8.0,
        escape(name),
        profile.runs().len(),
        steps.len(),
        bytes,
    )
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use layer::profile::{Run, Touch};

    #[test]
    fn every_touched_layer_has_a_band_and_every_read_a_mark() {
        let ids = [LayerId([1; 32]), LayerId([2; 32]), LayerId([3; 32])];
        let touch = |layer, start_block, at_ms| Touch { layer, start_block, blocks: 2, at_ms };
        let touches = vec![touch(0, 0, 1), touch(1, 9, 5), touch(0, 4, 9)];
        let run = Run::new(1, ids[..2].to_vec(), touches).unwrap();
        let profile = Profile::new(vec![run]);
        let layers = ids.map(|id| (id, 1 << 20));
        let drawn = draw("env/a<b", &layers, &profile, &profile.order());
        assert!(drawn.starts_with("<svg") && drawn.ends_with("</svg>\n"));
        assert!(drawn.contains("a&lt;b") && drawn.contains(&ids[1].short()));
        assert!(!drawn.contains(&ids[2].short()));
        assert_eq!(drawn.matches("width=\"3\"").count(), 3);
    }
}
