//! The HTTP client below `object_store`, with one habit more: what completes a multipart upload never
//! replaces an object.
//!
//! `object_store` can make a single put conditional, not the completion of an upload in parts. Objects of
//! ours are never replaced, so every such completion gets `If-None-Match: *`, which S3 takes there since
//! November 2024.

use async_trait::async_trait;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpService, ReqwestConnector,
};
use object_store::signer::HeaderValue;

/// Makes HTTP clients that never complete an upload over an object.
#[derive(Debug, Default)]
pub(super) struct NeverReplacing(ReqwestConnector);

impl HttpConnector for NeverReplacing {
    fn connect(&self, options: &object_store::ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(Conditional(self.0.connect(options)?)))
    }
}

#[derive(Debug)]
struct Conditional(HttpClient);

#[async_trait]
impl HttpService for Conditional {
    async fn call(&self, mut request: HttpRequest) -> Result<HttpResponse, HttpError> {
        if completes(request.method().as_str(), request.uri().query()) {
            request.headers_mut().insert("if-none-match", HeaderValue::from_static("*"));
        }
        self.0.execute(request).await
    }
}

/// `POST key?uploadId=...`: in S3 nothing else looks so.
fn completes(method: &str, query: Option<&str>) -> bool {
    let mut names = query.unwrap_or_default().split('&');
    method == "POST" && names.any(|parameter| parameter.starts_with("uploadId="))
}

#[cfg(test)]
mod tests {
    use super::completes;

    #[test]
    fn only_a_completion_is_made_conditional() {
        assert!(completes("POST", Some("uploadId=abc")));
        assert!(completes("POST", Some("x=1&uploadId=abc")));
        assert!(!completes("POST", Some("uploads")));
        assert!(!completes("PUT", Some("partNumber=1&uploadId=abc")));
        assert!(!completes("DELETE", Some("uploadId=abc")));
        assert!(!completes("POST", None));
    }
}
