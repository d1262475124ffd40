//! `events`: what happened, line by line, from the node or from its files when none is running.

use super::Scene;
use crate::args::Events;
use crate::errors::Outcome;
use crate::node::start;
use crate::output::{escape, safe_json, write_out};
use crate::quantity::show_time;
use layer::{Error, ErrorKind};
use proto::v1::EventsRequest;
use proto::v1::sandboxes_client::SandboxesClient;
use runtime::{EventFilter, EventReader};
use serde_json::Value;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// What is the same in every event and has its own place on the line.
const COMMON: [&str; 4] = ["seq", "unix_ns", "sandbox", "kind"];

/// `events`
pub async fn events(scene: &Scene, args: Events) -> Outcome {
    let since_unix_ns = args.since.map_or(0, before_now);
    let id = args.id.unwrap_or_default();
    let Some(node) = start::running(&scene.settings).await? else {
        if args.follow {
            let data = scene.settings.data().display();
            let text = format!("no node is running on {data}, so nothing will happen");
            return Err(Error::new(ErrorKind::Unavailable, text).into());
        }
        let Events { kinds, after, .. } = args;
        let filter = EventFilter { after, since_unix_ns, sandbox: id, kinds };
        return from_files(scene, filter);
    };
    let request = EventsRequest {
        after_sequence: args.after,
        sandbox_id: id,
        kinds: args.kinds,
        follow: args.follow,
        since_unix_ns,
    };
    let mut client = SandboxesClient::new(node.channel.clone());
    let mut events = client.events(request).await?.into_inner();
    while let Some(event) = events.message().await? {
        print(scene, &event.json)?;
    }
    Ok(())
}

fn before_now(time: Duration) -> u64 {
    let then = SystemTime::now().checked_sub(time).unwrap_or(UNIX_EPOCH);
    let then = then.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(then.as_nanos()).unwrap_or(u64::MAX)
}

fn from_files(scene: &Scene, filter: EventFilter) -> Outcome {
    let folder = scene.settings.data().join(runtime::EVENTS_FOLDER);
    if !folder.exists() {
        return Ok(());
    }
    let mut reader = EventReader::new(folder, filter);
    loop {
        let before = reader.next();
        let events = reader.read(u64::MAX)?;
        if events.is_empty() && reader.next() == before {
            return Ok(());
        }
        for event in events {
            print(scene, &event.json)?;
        }
    }
}

fn print(scene: &Scene, json: &str) -> Outcome {
    let line = if scene.out.is_json() { safe_json(json) } else { text(json) };
    write_out(format!("{line}\n").as_bytes())
}

/// One line for people: number, time, sandbox, kind, and what else there is.
fn text(json: &str) -> String {
    let Ok(Value::Object(event)) = serde_json::from_str(json) else { return escape(json) };
    let number = |name: &str| event.get(name).and_then(Value::as_u64).unwrap_or(0);
    let word = |name: &str| event.get(name).and_then(Value::as_str).unwrap_or_default();
    let sandbox = if word("sandbox").is_empty() { "-" } else { word("sandbox") };
    let mut line = format!(
        "{:>6} {} {:<12} {:<13}",
        number("seq"),
        show_time(number("unix_ns")),
        sandbox,
        word("kind")
    );
    for (name, value) in event.iter().filter(|(name, _)| !COMMON.contains(&name.as_str())) {
        let value = match value {
            Value::String(text) if text.is_empty() => continue,
            Value::String(text) if text.chars().all(is_plain) => text.clone(),
            Value::Null => continue,
            Value::Array(list) if list.is_empty() => continue,
            Value::Object(map) if map.is_empty() => continue,
            value => value.to_string(),
        };
        line.push_str(&format!(" {name}={value}"));
    }
    escape(line.trim_end())
}

fn is_plain(c: char) -> bool {
    c.is_alphanumeric() || "/._-:@+,".contains(c)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_line_that_drives_no_terminal() {
        let json = serde_json::json!({
            "seq": 7, "unix_ns": 0, "sandbox": "abc", "kind": "exec_start", "command": "c1",
            "argv": ["sh", "a\nb\u{1b}[2J\u{9b}"], "user": "", "cwd": "/x y", "tty": false,
        });
        let line = text(&json.to_string());
        assert!(!line.chars().any(char::is_control), "{line:?}");
        assert!(line.contains(" 1970-01-01T00:00:00Z abc          exec_start "), "{line}");
        assert!(line.contains("command=c1") && line.contains("cwd=\"/x y\""), "{line}");
        assert!(!line.contains("user="), "{line}");
    }
}
