//! Draws figures as horizontal bars into an SVG, without anything but text.
//!
//! One panel a case and quantity that at least two sides have; a whisker shows the smallest and the largest
//! sample. What only one side has is told in a line below the case's panels.

use crate::report::Figure;
use std::fmt::Write;

const WIDTH: f64 = 800.0;
const LABEL: f64 = 210.0;
const VALUE: f64 = 120.0;
const LINE: f64 = 22.0;
/// Quantities in one line of text.
const TOLD: usize = 3;
const COLOURS: [&str; 6] = ["#3465a4", "#cc7a29", "#6b8e23", "#8b5a8c", "#777777", "#b03a3a"];

/// A whole SVG document.
pub fn draw(title: &str, caption: &str, figures: &[Figure]) -> String {
    let mut panels: Vec<(String, Vec<&Figure>)> = Vec::new();
    for figure in figures {
        let name = format!("{}: {}", figure.case, figure.quantity);
        match panels.iter_mut().find(|(known, _)| *known == name) {
            Some((_, members)) => members.push(figure),
            None => panels.push((name, vec![figure])),
        }
    }
    let mut sides: Vec<&str> = Vec::new();
    for figure in figures {
        if !sides.contains(&figure.side.as_str()) {
            sides.push(&figure.side);
        }
    }
    let mut body = String::new();
    let mut y = 64.0;
    let mut panels = panels.iter().peekable();
    let mut alone: Vec<String> = Vec::new();
    while let Some((name, members)) = panels.next() {
        if let [figure] = members[..] {
            let Figure { side, quantity, unit, median, .. } = figure;
            alone.push(format!("{side}, {quantity} {}", unit.show(*median)));
        } else {
            y = panel(&mut body, y, name, members, &sides);
        }
        let case = members.first().map(|figure| &figure.case);
        let next = panels.peek().and_then(|(_, members)| members.first());
        if next.map(|figure| &figure.case) != case {
            y = told(&mut body, y, case.map_or("", String::as_str), &alone);
            alone.clear();
        }
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH:.0}\" height=\"{y:.0}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"10\" y=\"22\" font-size=\"16\">{}</text>\n\
         <text x=\"10\" y=\"40\" fill=\"#666666\" font-size=\"11\">{}</text>\n{body}</svg>\n",
        escape(title),
        escape(caption)
    )
}

/// Draws one panel from `y` down; answers where the next begins.
fn panel(body: &mut String, mut y: f64, name: &str, members: &[&Figure], sides: &[&str]) -> f64 {
    let direction = members.first().map_or("", |figure| figure.unit.direction());
    let _ = writeln!(
        body,
        r##"<text x="10" y="{y:.0}"><tspan font-weight="bold">{}</tspan><tspan dx="6" fill="#666666" font-size="11">({direction})</tspan></text>"##,
        escape(name)
    );
    y += 8.0;
    for figure in members {
        let colour = sides.iter().position(|side| *side == figure.side).unwrap_or(0);
        bar(body, y, figure, largest(members), COLOURS[colour % COLOURS.len()]);
        y += LINE;
    }
    y + 24.0
}

/// Writes what only one side of a case has, some to a line.
fn told(body: &mut String, mut y: f64, case: &str, alone: &[String]) -> f64 {
    for line in alone.chunks(TOLD) {
        let text = escape(&format!("{case}: {}", line.join("; ")));
        let _ = writeln!(
            body,
            r##"<text x="10" y="{:.0}" fill="#444444" font-size="12">{text}</text>"##,
            y - 6.0
        );
        y += LINE;
    }
    y
}

fn largest(members: &[&Figure]) -> f64 {
    members.iter().map(|figure| figure.max).fold(f64::MIN_POSITIVE, f64::max)
}

fn bar(body: &mut String, y: f64, figure: &Figure, largest: f64, colour: &str) {
    let room = WIDTH - LABEL - VALUE;
    let at = |value: f64| LABEL + room * (value / largest).clamp(0.0, 1.0);
    let middle = y + LINE / 2.0;
    let text = middle + 4.0;
    let _ = writeln!(
        body,
        r#"<text x="{:.0}" y="{text:.1}" text-anchor="end">{}</text>"#,
        LABEL - 8.0,
        escape(&figure.side)
    );
    let _ = writeln!(
        body,
        r#"<rect x="{LABEL:.0}" y="{:.1}" width="{:.1}" height="{:.1}" fill="{colour}"/>"#,
        y + 3.0,
        (at(figure.median) - LABEL).max(1.0),
        LINE - 6.0
    );
    let _ = writeln!(
        body,
        r##"<path d="M{:.1} {middle:.1}H{:.1}" stroke="#222222" stroke-width="1.5"/>"##,
        at(figure.min),
        at(figure.max)
    );
    let _ = writeln!(
        body,
        r#"<text x="{:.1}" y="{text:.1}">{}</text>"#,
        at(figure.max) + 6.0,
        escape(&figure.unit.show(figure.median))
    );
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Unit;

    #[test]
    fn a_plot_names_every_side_and_escapes_them() {
        let figure = |side: &str, median: f64| Figure {
            case: "true".into(),
            side: side.into(),
            quantity: "time".into(),
            unit: Unit::Seconds,
            median,
            min: median,
            max: median * 2.0,
            samples: vec![median],
        };
        let asked = Figure { quantity: "asked".into(), ..figure("lazy", 0.2) };
        let figures = [figure("lazy", 0.1), figure("<eager>", 10.0), asked];
        let drawn = draw("cold", "here & now", &figures);
        assert!(drawn.starts_with("<svg") && drawn.ends_with("</svg>\n"));
        assert!(drawn.contains("&lt;eager&gt;") && drawn.contains("here &amp; now"));
        assert_eq!(drawn.matches("true: time").count(), 1);
        assert!(drawn.contains("true: lazy, asked 200.0 ms"), "one side alone is text");
        assert!(drawn.contains("10.00 s") && drawn.contains("100.0 ms"));
    }
}
