//! What filters mean, and that no text makes the parser panic.

use super::*;
use crate::labels::Labels;
use crate::record::Kind;
use proptest::prelude::*;

fn snapshot() -> Snapshot {
    Snapshot {
        id: 1,
        name: "default/1/sha256:ab".into(),
        parent: String::new(),
        kind: Kind::Committed,
        created_ns: 0,
        updated_ns: 0,
        labels: Labels::from([
            ("containerd.io/snapshot.ref".into(), "sha256:ab".into()),
            ("plain".into(), "a, b".into()),
        ]),
        shown: None,
        usage: None,
    }
}

fn wants(filters: &[&str]) -> bool {
    let filters: Vec<String> = filters.iter().map(|&filter| filter.to_owned()).collect();
    Filters::parse(&filters).unwrap().want(&snapshot())
}

#[test]
fn filters_mean_what_containerd_means() {
    for (filters, wanted) in [
        (&[][..], true),
        (&[""], true),
        (&["kind==committed"], true),
        (&["kind==active"], false),
        (&["kind!=active"], true),
        (&["kind==active", "name==default/1/sha256:ab"], true),
        (&["kind==committed,name==x"], false),
        (&["name~=sha256"], true),
        (&["name~=/^default\\/[0-9]+\\//"], true),
        (&["name~=|^x|"], false),
        (&["parent"], true),
        (&["parent==\"\""], true),
        (&["parent!=x"], true),
        (&["labels.plain"], true),
        (&["labels.plain==\"a, b\""], true),
        (&["labels.plain==\"a\\x2c b\""], true),
        (&["labels.\"plain\"==`a, b`"], true),
        (&["labels.\"containerd.io/snapshot.ref\"==sha256:ab"], true),
        (&["labels.\"containerd.io/snapshot.ref\"==sha256:ab,parent==\"x\""], false),
        (&["labels.absent"], false),
        (&["labels.absent!=x"], true),
        (&["labels"], false),
        (&["unknown"], false),
    ] {
        assert_eq!(wants(filters), wanted, "{filters:?}");
    }
}

#[test]
fn what_is_no_filter_is_refused() {
    for bad in [
        "==x",
        "name=x",
        "name==",
        "name==x,",
        ",",
        "name ==x",
        "labels.",
        "labels.\"a",
        "9a",
        "name~=(",
        "name==\"\\q\"",
        "name==\"\\xz0\"",
        "name==\"\\ud800\"",
        "name<x",
    ] {
        assert!(Filters::parse(&[bad.to_owned()]).is_err(), "{bad}");
    }
    assert!(Filters::parse(&["x".repeat(1 << 17)]).is_err());
    assert!(Filters::parse(&["name~=/(((a{999}){999}){999})/".to_owned()]).is_err());
}

proptest! {
    #[test]
    fn no_text_makes_it_panic(text in "[a-z.,=!~\"`/|\\\\x0-9 ]{0,60}|\\PC{0,40}") {
        if let Ok(filters) = Filters::parse(&[text]) {
            filters.want(&snapshot());
        }
    }

    #[test]
    fn a_quoted_value_is_that_value(value in "\\PC{1,40}") {
        let quoted = value.replace('\\', "\\\\").replace('"', "\\\"");
        let filters = Filters::parse(&[format!("labels.a==\"{quoted}\"")]).unwrap();
        let mut snapshot = snapshot();
        snapshot.labels.insert("a".into(), value);
        prop_assert!(filters.want(&snapshot));
    }
}
