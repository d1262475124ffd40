//! The gRPC face of the log: one stream for each reader.

use super::EventLog;
use super::reader::{Event, Filter, Reader};
use super::record::KINDS;
use layer::{Error, ErrorKind, Result};
use proto::status::to_status;
use proto::v1;
use std::sync::Arc;
use tokio::sync::{Semaphore, mpsc};
use tonic::Status;

/// Events that wait for one reader.
const QUEUE: usize = 16;
/// Readers at once.
const MAX_READERS: usize = 64;

static READERS: Semaphore = Semaphore::const_new(MAX_READERS);

/// What a client asks for, checked.
fn filter(request: v1::EventsRequest) -> Result<Filter> {
    if let Some(unknown) = request.kinds.iter().find(|kind| !KINDS.contains(&kind.as_str())) {
        let known = KINDS.join(", ");
        return Err(Error::invalid(format!(
            "there is no kind {unknown:?} of events; there are {known}"
        )));
    }
    Ok(Filter {
        after: request.after_sequence,
        since_unix_ns: request.since_unix_ns,
        sandbox: request.sandbox_id,
        kinds: request.kinds,
    })
}

/// Events from the past, and with `follow` those to come, until the client leaves.
pub fn stream(
    log: &Arc<EventLog>,
    request: v1::EventsRequest,
) -> Result<mpsc::Receiver<Result<v1::Event, Status>>> {
    let Ok(permit) = READERS.try_acquire() else {
        let text = format!("{MAX_READERS} readers of events are connected already");
        return Err(Error::new(ErrorKind::Busy, text));
    };
    let is_following = request.follow;
    let mut reader = Reader::new(log.folder(), filter(request)?);
    let (log, mut written) = (Arc::clone(log), log.written());
    let (sender, receiver) = mpsc::channel(QUEUE);
    tokio::spawn(async move {
        let _permit = permit;
        log.catch_up().await;
        loop {
            let through = written.borrow_and_update().last;
            let (read, events) = match read_all(reader, through, &sender).await {
                Some(read) => read,
                None => return,
            };
            reader = read;
            if let Err(error) = events {
                let _left = sender.send(Err(to_status(error))).await;
                return;
            }
            if !is_following {
                return;
            }
            tokio::select! {
                changed = written.changed() => if changed.is_err() { return },
                () = sender.closed() => return,
            }
        }
    });
    Ok(receiver)
}

/// Sends everything through this number; none when the client has left.
async fn read_all(
    mut reader: Reader,
    through: u64,
    sender: &mpsc::Sender<Result<v1::Event, Status>>,
) -> Option<(Reader, Result<()>)> {
    loop {
        let before = reader.next();
        let reading = tokio::task::spawn_blocking(move || {
            let events = reader.read(through);
            (reader, events)
        });
        let (read, events) = reading.await.ok()?;
        reader = read;
        let events = match events {
            Ok(events) => events,
            Err(error) => return Some((reader, Err(error))),
        };
        let is_end = events.is_empty() && reader.next() == before;
        for event in events {
            sender.send(Ok(wire(event))).await.ok()?;
        }
        if is_end || reader.next() > through {
            return Some((reader, Ok(())));
        }
    }
}

fn wire(event: Event) -> v1::Event {
    v1::Event {
        sequence: event.seq,
        unix_ns: event.unix_ns,
        sandbox_id: event.sandbox,
        kind: event.kind,
        json: event.json,
    }
}
