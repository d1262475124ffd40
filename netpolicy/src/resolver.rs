//! The only name server that a sandbox has.
//!
//! It answers for allowed names, and teaches the filter the addresses that it answers. For any other name it
//! says that there is none, and asks nobody: no bit of such a question leaves this host. Of an allowed name it
//! forwards the question for addresses, and nothing else of the message.
//!
//! Bounded: messages of 4 KiB, so many questions at once, so many a second and sandbox.

mod upstream;

pub use upstream::Upstream;

use crate::denials::{Denial, Reason};
use crate::member::Member;
use crate::name::DomainName;
use crate::network::Members;
use crate::range::GATEWAY;
use crate::relay::member_at;
use hickory_proto::op::{Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::A;
use hickory_proto::rr::{DNSClass, RData, Record, RecordType};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::Semaphore;

/// Longest question that is read.
const MAX_QUESTION_BYTES: usize = 4096;
/// Questions that are being answered at once, of all sandboxes.
const MAX_AT_ONCE: usize = 256;
/// Addresses in one answer.
const MAX_ADDRESSES: usize = 16;
/// How long an answer holds at most; a name whose server is gone is asked for again.
const MAX_TTL: Duration = Duration::from_secs(300);
/// How long an answer holds at least.
const MIN_TTL: Duration = Duration::from_secs(5);
/// How long a client may be silent on a stream.
const STREAM_TIMEOUT: Duration = Duration::from_secs(10);

/// Answers datagrams for ever.
pub async fn serve(socket: UdpSocket, members: Arc<Members>, upstream: Arc<Upstream>) {
    let (socket, turns) = (Arc::new(socket), Arc::new(Semaphore::new(MAX_AT_ONCE)));
    let mut buffer = [0; MAX_QUESTION_BYTES];
    loop {
        let (length, from) = match socket.recv_from(&mut buffer).await {
            Ok(received) => received,
            Err(error) => {
                tracing::debug!(%error, "receive a question");
                continue;
            }
        };
        let Some(member) = member_at(from, &members) else { continue };
        let Ok(turn) = Arc::clone(&turns).try_acquire_owned() else {
            member.deny(Denial::now(Reason::Limit, "dns"));
            continue;
        };
        let (question, socket) = (buffer[..length].to_vec(), Arc::clone(&socket));
        let upstream = Arc::clone(&upstream);
        tokio::spawn(async move {
            let _turn = turn;
            if let Some(answer) = answer(&question, &member, &upstream).await {
                let _client_gone = socket.send_to(&answer, from).await;
            }
        });
    }
}

/// Answers on connections, for ever.
pub async fn serve_streams(listener: TcpListener, members: Arc<Members>, upstream: Arc<Upstream>) {
    let turns = Arc::new(Semaphore::new(MAX_AT_ONCE));
    loop {
        let Ok((stream, from)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let Some(member) = member_at(from, &members) else { continue };
        let (Ok(turn), upstream) = (Arc::clone(&turns).try_acquire_owned(), Arc::clone(&upstream))
        else {
            member.deny(Denial::now(Reason::Limit, "dns"));
            continue;
        };
        tokio::spawn(async move {
            let _turn = turn;
            let served = serve_stream(stream, &member, &upstream);
            let _too_slow = tokio::time::timeout(STREAM_TIMEOUT, served).await;
        });
    }
}

async fn serve_stream(
    mut stream: TcpStream,
    member: &Member,
    upstream: &Upstream,
) -> std::io::Result<()> {
    loop {
        let length = usize::from(stream.read_u16().await?);
        let mut question = vec![0; length.min(MAX_QUESTION_BYTES)];
        if length > question.len() {
            return Ok(());
        }
        stream.read_exact(&mut question).await?;
        let Some(answer) = answer(&question, member, upstream).await else { return Ok(()) };
        stream.write_u16(answer.len() as u16).await?;
        stream.write_all(&answer).await?;
    }
}

/// The question of a message, if it is one that can be answered at all.
#[derive(Debug)]
struct Asked {
    id: u16,
    query: Query,
    wants_recursion: bool,
}

fn read(bytes: &[u8]) -> Result<Asked, Option<Box<Message>>> {
    let message = Message::from_vec(bytes).map_err(|_| None)?;
    let meta = &message.metadata;
    if meta.message_type != MessageType::Query {
        return Err(None);
    }
    let refused = |code| Some(Box::new(Message::error_msg(meta.id, meta.op_code, code)));
    if meta.op_code != OpCode::Query {
        return Err(refused(ResponseCode::NotImp));
    }
    match &message.queries[..] {
        [query] if query.query_class() == DNSClass::IN => {
            Ok(Asked { id: meta.id, query: query.clone(), wants_recursion: meta.recursion_desired })
        }
        _ => Err(refused(ResponseCode::FormErr)),
    }
}

async fn answer(question: &[u8], member: &Member, upstream: &Upstream) -> Option<Vec<u8>> {
    let reply = match read(question) {
        Ok(asked) => respond(asked, member, upstream).await,
        Err(reply) => {
            member.deny(Denial::now(Reason::Malformed, "dns"));
            *reply?
        }
    };
    reply.to_vec().ok()
}

async fn respond(asked: Asked, member: &Member, upstream: &Upstream) -> Message {
    let text = asked.query.name().to_ascii();
    let mut reply = Message::response(asked.id, OpCode::Query);
    reply.metadata.recursion_desired = asked.wants_recursion;
    reply.metadata.recursion_available = true;
    reply.add_query(asked.query.clone());
    match look_up(&text, asked.query.query_type(), member, upstream).await {
        Ok((addresses, ttl)) => {
            for address in addresses.into_iter().take(MAX_ADDRESSES) {
                let name = asked.query.name().clone();
                let data = RData::A(A(address));
                reply.add_answer(Record::from_rdata(name, ttl.as_secs() as u32, data));
            }
        }
        Err(code) => reply.metadata.response_code = code,
    }
    reply
}

/// Addresses of a name and how long they hold; none for a name that exists and has nothing of this type.
async fn look_up(
    text: &str,
    kind: RecordType,
    member: &Member,
    upstream: &Upstream,
) -> Result<(Vec<Ipv4Addr>, Duration), ResponseCode> {
    let refuse = |reason| {
        member.deny(Denial::now(reason, "dns").named(text));
        Err(ResponseCode::NXDomain)
    };
    let Ok(name) = DomainName::parse(text) else { return refuse(Reason::NotAllowed) };
    let policy = member.policy();
    if let Some(preset) = policy.registry_of(&name) {
        return match (preset.answers(&name), kind) {
            (true, RecordType::A) => Ok((vec![GATEWAY], MIN_TTL)),
            (true, _) => Ok((Vec::new(), MIN_TTL)),
            (false, _) => refuse(Reason::NotAllowed),
        };
    }
    if policy.ports_of_name(&name).is_empty() {
        return refuse(Reason::NotAllowed);
    }
    if kind != RecordType::A {
        // There is no IPv6, and other records could carry anything.
        return Ok((Vec::new(), MIN_TTL));
    }
    if !member.may_ask() {
        member.deny(Denial::now(Reason::Limit, "dns").named(text));
        return Err(ResponseCode::Refused);
    }
    let found = upstream.addresses(&name).await?;
    let ttl = found.ttl.clamp(MIN_TTL, MAX_TTL);
    let told = member.learn(&name, &found.addresses, ttl).map_err(|error| {
        tracing::warn!(id = member.id(), error = %error.chain(), "an answer is not passed on");
        member.deny(Denial::now(Reason::Limit, "dns").named(text));
        ResponseCode::ServFail
    })?;
    Ok((told, ttl))
}

/// Reads a message as a question of a sandbox and as an answer of a resolver. For fuzzing.
#[doc(hidden)]
pub fn read_question(bytes: &[u8]) -> bool {
    upstream::read_anything(bytes);
    read(bytes).is_ok_and(|asked| DomainName::parse(&asked.query.name().to_ascii()).is_ok())
}
