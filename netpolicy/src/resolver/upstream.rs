//! Asks the resolvers of this host for the addresses of one name. Every question is written anew: nothing of a
//! sandbox's message is in it but the name.

use crate::name::DomainName;
use hickory_proto::op::{Message, MessageType, Query, ResponseCode};
use hickory_proto::rr::{Name, RData, RecordType};
use layer::{Error, ErrorKind, Result};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};

/// How long one resolver may take.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Longest answer that is read.
const MAX_ANSWER_BYTES: usize = 16 << 10;
/// Links of a chain of names that are followed within one answer.
const MAX_CHAIN: usize = 16;

/// The resolvers.
#[derive(Debug)]
pub struct Upstream {
    servers: Vec<SocketAddr>,
}

/// What a name led to.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Its addresses.
    pub addresses: Vec<Ipv4Addr>,
    /// How long that holds.
    pub ttl: Duration,
}

impl Upstream {
    /// With these resolvers; if there are none, those of this host.
    pub fn new(servers: Vec<SocketAddr>) -> Result<Self> {
        if !servers.is_empty() {
            return Ok(Self { servers });
        }
        let text = match std::fs::read_to_string("/etc/resolv.conf") {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(Error::io("read /etc/resolv.conf", error)),
        };
        Ok(Self { servers: of_file(&text) })
    }

    /// Addresses of a name. Servers are asked in turn until one answers.
    pub async fn addresses(&self, name: &DomainName) -> Result<Found, ResponseCode> {
        for server in &self.servers {
            match tokio::time::timeout(TIMEOUT, ask(*server, name)).await {
                Ok(Ok(found)) => return found,
                Ok(Err(error)) => tracing::debug!(%server, error = %error.chain(), "resolver"),
                Err(_) => tracing::debug!(%server, "a resolver does not answer"),
            }
        }
        Err(ResponseCode::ServFail)
    }
}

/// `nameserver` lines of resolv.conf(5).
fn of_file(text: &str) -> Vec<SocketAddr> {
    let servers = text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some("nameserver")).then(|| words.next()?.parse::<IpAddr>().ok())?
    });
    const MOST: usize = 3;
    servers.take(MOST).map(|address| SocketAddr::new(address, 53)).collect()
}

async fn ask(server: SocketAddr, name: &DomainName) -> Result<Result<Found, ResponseCode>> {
    let io = |what: &str| {
        let text = format!("{what} {server}");
        move |error| Error::io(text, error)
    };
    let wrong = |_| Error::new(ErrorKind::Invalid, format!("name {name}"));
    let wanted = Name::from_ascii(format!("{name}.")).map_err(wrong)?;
    let mut question = Message::query();
    let mut id = [0; 2];
    getrandom::fill(&mut id)
        .map_err(|error| Error::new(ErrorKind::Internal, format!("random numbers: {error}")))?;
    question.metadata.id = u16::from_ne_bytes(id);
    question.metadata.recursion_desired = true;
    question.add_query(Query::query(wanted.clone(), RecordType::A));
    let failed = |error| Error::new(ErrorKind::Internal, "write a question").with_source(error);
    let bytes = question.to_vec().map_err(failed)?;
    let local = match server {
        SocketAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
        SocketAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
    };
    // A port of its own for each question: with the number of the message, 32 bits to guess.
    let socket = UdpSocket::bind(local).await.map_err(io("socket for"))?;
    socket.connect(server).await.map_err(io("connect to"))?;
    socket.send(&bytes).await.map_err(io("ask"))?;
    let mut buffer = vec![0; MAX_ANSWER_BYTES];
    loop {
        let length = socket.recv(&mut buffer).await.map_err(io("hear from"))?;
        let Some(answer) = matching(&buffer[..length], &question) else { continue };
        if !answer.metadata.truncation {
            return Ok(read(&answer, &wanted));
        }
        break;
    }
    let mut stream = TcpStream::connect(server).await.map_err(io("connect to"))?;
    stream.write_u16(bytes.len() as u16).await.map_err(io("ask"))?;
    stream.write_all(&bytes).await.map_err(io("ask"))?;
    let length = usize::from(stream.read_u16().await.map_err(io("hear from"))?);
    buffer.resize(length, 0);
    stream.read_exact(&mut buffer).await.map_err(io("hear from"))?;
    let answer = matching(&buffer, &question)
        .ok_or_else(|| Error::new(ErrorKind::Corrupt, format!("{server} answers nonsense")))?;
    Ok(read(&answer, &wanted))
}

/// The message, if it answers exactly this question.
fn matching(bytes: &[u8], question: &Message) -> Option<Message> {
    let answer = Message::from_vec(bytes).ok()?;
    let is_ours = answer.metadata.id == question.metadata.id
        && answer.metadata.message_type == MessageType::Response
        && answer.queries == question.queries;
    is_ours.then_some(answer)
}

/// Follows the chain of names within an answer to its addresses.
fn read(answer: &Message, wanted: &Name) -> Result<Found, ResponseCode> {
    match answer.metadata.response_code {
        ResponseCode::NoError => {}
        ResponseCode::NXDomain => return Err(ResponseCode::NXDomain),
        _ => return Err(ResponseCode::ServFail),
    }
    let mut ttl = u32::MAX;
    let mut owner = wanted.clone();
    for _ in 0..MAX_CHAIN {
        let next = answer.answers.iter().find_map(|record| match &record.data {
            RData::CNAME(target) if record.name == owner => Some((target.0.clone(), record.ttl)),
            _ => None,
        });
        let Some((target, holds)) = next else { break };
        (owner, ttl) = (target, ttl.min(holds));
    }
    let mut addresses = Vec::new();
    for record in answer.answers.iter().filter(|record| record.name == owner) {
        if let RData::A(address) = &record.data {
            addresses.push(address.0);
            ttl = ttl.min(record.ttl);
        }
    }
    let ttl = if addresses.is_empty() { 0 } else { ttl };
    Ok(Found { addresses, ttl: Duration::from_secs(ttl.into()) })
}

/// Follows whatever a message says about the name that it asks for.
pub(super) fn read_anything(bytes: &[u8]) {
    let Ok(message) = Message::from_vec(bytes) else { return };
    if let Some(query) = message.queries.first() {
        let found = read(&message, query.name());
        debug_assert!(
            found.is_err() || found.is_ok_and(|found| found.addresses.len() <= bytes.len())
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hickory_proto::op::OpCode;
    use hickory_proto::rr::Record;
    use hickory_proto::rr::rdata::{A, CNAME};

    fn name(text: &str) -> Name {
        Name::from_ascii(text).unwrap()
    }

    #[test]
    fn a_chain_of_names_is_followed_and_strangers_are_not_believed() {
        let mut answer = Message::response(1, OpCode::Query);
        let (www, cdn) = (name("www.a.org."), name("cdn.b.net."));
        answer.add_answer(Record::from_rdata(www.clone(), 60, RData::CNAME(CNAME(cdn.clone()))));
        answer.add_answer(Record::from_rdata(cdn, 20, RData::A(A::new(192, 0, 2, 1))));
        answer.add_answer(Record::from_rdata(name("x.org."), 9, RData::A(A::new(192, 0, 2, 66))));
        let found = read(&answer, &www).unwrap();
        assert_eq!(found.addresses, [Ipv4Addr::new(192, 0, 2, 1)]);
        assert_eq!(found.ttl, Duration::from_secs(20));
        let mut circle = Message::response(1, OpCode::Query);
        circle.add_answer(Record::from_rdata(www.clone(), 60, RData::CNAME(CNAME(www.clone()))));
        assert_eq!(read(&circle, &www).unwrap(), Found::default());
    }

    #[test]
    fn resolvers_of_the_host_are_found() {
        let servers =
            of_file("# x\nsearch a.b\nnameserver 192.0.2.53\nnameserver ::1\nnameserver y\n");
        assert_eq!(servers.len(), 2);
        assert_eq!(servers[0], "192.0.2.53:53".parse().unwrap());
    }
}
